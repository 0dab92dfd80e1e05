//! Events: made, correlated, queued and written, as client-go's recorder does.

pub mod correlate;
mod lru;
pub mod recorder;

pub use correlate::{Correlator, Outcome, StoredEvent};
pub use recorder::{EventWriter, Recorder};
