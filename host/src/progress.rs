//! How far a long piece of work is.

/// Told about work as it is done, from any thread.
pub trait Progress: Sync {
    /// A new stage begins: what it is, and how many bytes it will go through.
    fn stage(&self, what: &str, total_bytes: u64) {
        let _ = (what, total_bytes);
    }

    /// So many more bytes are done.
    fn advance(&self, bytes: u64) {
        let _ = bytes;
    }

    /// Whether the work should stop at the next safe point.
    fn cancelled(&self) -> bool {
        false
    }
}

/// Passes on that the work is cancelled, and shows nothing.
pub struct Quiet<'a>(pub &'a dyn Progress);

impl Progress for Quiet<'_> {
    fn cancelled(&self) -> bool {
        self.0.cancelled()
    }
}

/// Shows nothing and never cancels.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Progress for Silent {}
