//! A progress bar on standard error, where that is a terminal, and Ctrl-C.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::progress::Progress;

static CANCELLED: AtomicBool = AtomicBool::new(false);

/// Makes Ctrl-C, SIGTERM and SIGHUP stop work at the next safe point; the
/// second one ends the process at once.
pub(super) fn watch_signals() {
    static ONCE: OnceLock<()> = OnceLock::new();
    ONCE.get_or_init(|| {
        let installed = ctrlc::set_handler(|| {
            if CANCELLED.swap(true, Ordering::SeqCst) {
                std::process::exit(130);
            }
            eprintln!("\nstopping; once more to stop at once");
        });
        if let Err(e) = installed {
            eprintln!("note: signals are not handled: {e}");
        }
    });
}

/// Only says whether the user wants to stop.
pub(super) struct Signals;

impl Progress for Signals {
    fn cancelled(&self) -> bool {
        CANCELLED.load(Ordering::Relaxed)
    }
}

/// Shows the current stage.
#[derive(Default)]
pub(super) struct Bar {
    bar: Mutex<Option<ProgressBar>>,
}

impl Bar {
    /// A bar that shows nothing yet; watches signals from now on.
    pub(super) fn new() -> Self {
        watch_signals();
        Bar::default()
    }

    /// Takes the bar off the screen.
    pub(super) fn clear(&self) {
        if let Some(bar) = self.bar.lock().unwrap_or_else(PoisonError::into_inner).take() {
            bar.finish_and_clear();
        }
    }
}

impl Progress for Bar {
    fn stage(&self, what: &str, total_bytes: u64) {
        self.clear();
        let bar = ProgressBar::with_draw_target(Some(total_bytes), ProgressDrawTarget::stderr_with_hz(10));
        let style =
            ProgressStyle::with_template("{msg:<10} {bar:32} {bytes:>10} of {total_bytes}  {bytes_per_sec}  {eta}");
        if let Ok(style) = style {
            bar.set_style(style.progress_chars("█▉▊▋▌▍▎▏ "));
        }
        bar.set_message(what.to_string());
        bar.enable_steady_tick(Duration::from_millis(200));
        *self.bar.lock().unwrap_or_else(PoisonError::into_inner) = Some(bar);
    }

    fn advance(&self, bytes: u64) {
        if let Some(bar) = &*self.bar.lock().unwrap_or_else(PoisonError::into_inner) {
            bar.inc(bytes);
        }
    }

    fn cancelled(&self) -> bool {
        CANCELLED.load(Ordering::Relaxed)
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.clear();
    }
}
