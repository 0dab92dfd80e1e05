//! Is this host fit to be a node?
pub(crate) mod render;
pub(crate) fn run(_: &[String], _: crate::cli::Output) -> i32 {
    0
}
