//! The pod's Go types: field order and type names for the static pod UID, JSON names and kinds for type checks.

use std::collections::HashMap;
use std::sync::LazyLock;

/// Facts of Kubernetes 1.36, one type a line.
static TABLE: &str = include_str!("../data/podtypes.tsv");

/// Fields of the v1 API that the internal types keep elsewhere.
const V1_ONLY: &[(&str, &str, &str)] = &[
    ("core.PodSpec", "serviceAccount", "string"),
    ("core.PodSpec", "hostNetwork", "bool"),
    ("core.PodSpec", "hostPID", "bool"),
    ("core.PodSpec", "hostIPC", "bool"),
    ("core.PodSpec", "shareProcessNamespace", "*bool"),
    ("core.PodSpec", "hostUsers", "*bool"),
    ("core.PodStatus", "podIP", "string"),
];

/// A Go type.
pub(crate) struct Type {
    /// As Go prints it.
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
}

/// What a type is made of.
pub(crate) enum Kind {
    Pointer(Box<Type>),
    List(Box<Type>),
    Map(Box<Type>),
    ResourceList,
    Struct,
    String,
    Bool,
    Int32,
    Int64,
    Quantity,
    Time,
    IntOrString,
    RawJson,
}

/// One field of a struct.
pub(crate) struct Field {
    pub(crate) go: &'static str,
    pub(crate) json: Json,
    pub(crate) ty: Type,
}

/// Where a field is in JSON.
pub(crate) enum Json {
    Name(String),
    /// Its fields are those of the struct around it.
    Inline,
    /// Not there; see [`V1_ONLY`].
    Moved,
}

/// Every struct type by name.
pub(crate) struct Schema {
    structs: HashMap<&'static str, Vec<Field>>,
    v1_only: HashMap<&'static str, Vec<Field>>,
}

/// The pod's schema.
pub(crate) static SCHEMA: LazyLock<Schema> = LazyLock::new(|| {
    let lines = || TABLE.lines().filter_map(|l| l.split_once('\t'));
    let names: Vec<&str> = lines().map(|(name, _)| name).collect();
    let structs = lines()
        .map(|(name, fields)| {
            let fields = fields.split("; ").filter_map(|f| {
                let (names_, ty) = f.split_once(' ')?;
                let (go, json) = names_.split_once(':').unwrap_or((names_, ""));
                let json = match json {
                    "" => Json::Name(go[..1].to_ascii_lowercase() + &go[1..]),
                    "*" => Json::Inline,
                    "-" => Json::Moved,
                    name => Json::Name(name.into()),
                };
                Some(Field { go, json, ty: Type::parse(ty, &names) })
            });
            (name, fields.collect())
        })
        .collect();
    let mut v1_only: HashMap<&str, Vec<Field>> = HashMap::new();
    for &(of, json, ty) in V1_ONLY {
        let field = Field { go: json, json: Json::Name(json.into()), ty: Type::parse(ty, &names) };
        v1_only.entry(of).or_default().push(field);
    }
    Schema { structs, v1_only }
});

impl Type {
    fn parse(name: &'static str, structs: &[&str]) -> Self {
        let of = |rest: &'static str| Box::new(Self::parse(rest, structs));
        let kind = if let Some(rest) = name.strip_prefix('*') {
            Kind::Pointer(of(rest))
        } else if let Some(rest) = name.strip_prefix("[]") {
            Kind::List(of(rest))
        } else if let Some((_, rest)) = name.strip_prefix("map[").and_then(|r| r.split_once(']')) {
            Kind::Map(of(rest))
        } else {
            match name {
                "core.ResourceList" => Kind::ResourceList,
                "bool" => Kind::Bool,
                "int32" => Kind::Int32,
                "int64" => Kind::Int64,
                "resource.Quantity" => Kind::Quantity,
                "v1.Time" => Kind::Time,
                "intstr.IntOrString" => Kind::IntOrString,
                "v1.FieldsV1" => Kind::RawJson,
                _ if structs.contains(&name) => Kind::Struct,
                // Every other named type is a string.
                _ => Kind::String,
            }
        };
        Self { name, kind }
    }
}

impl Schema {
    /// The internal pod.
    pub(crate) fn pod(&self) -> Type {
        Type { name: "core.Pod", kind: Kind::Struct }
    }

    /// Fields in Go's order.
    pub(crate) fn fields(&self, name: &str) -> &[Field] {
        self.structs.get(name).map_or(&[], Vec::as_slice)
    }

    /// The field that a JSON key of this struct is decoded into, and the inlined struct that it is in, if any.
    pub(crate) fn json_field(&self, name: &str, key: &str) -> Option<(Option<&'static str>, &Field)> {
        let own = self.fields(name).iter().chain(self.v1_only.get(name).into_iter().flatten());
        own.into_iter().find_map(|field| match &field.json {
            Json::Name(n) if n == key => Some((None, field)),
            Json::Inline => self.json_field(field.ty.name, key).map(|(_, inner)| (Some(field.go), inner)),
            _ => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_names() {
        let has = |ty: &str, key: &str| SCHEMA.json_field(ty, key).map(|(_, f)| f.ty.name);
        assert_eq!(has("core.PodSpec", "dnsPolicy"), Some("core.DNSPolicy"));
        assert_eq!(has("core.PodSpec", "hostPID"), Some("bool"));
        assert_eq!(has("core.Volume", "emptyDir"), Some("*core.EmptyDirVolumeSource"));
        assert_eq!(has("core.RBDVolumeSource", "monitors"), Some("[]string"));
        assert_eq!(has("core.Container", "containerport"), None);
        assert_eq!(has("core.PodSecurityContext", "hostPID"), None);
        assert_eq!(has("core.Probe", "httpGet"), Some("*core.HTTPGetAction"));
    }
}
