//! Kubernetes resource quantities: parsing, arithmetic and Go's canonical form.
