//! cri-api
