//! One error type, with stable codes.
//!
//! A [`Code`] never changes its name; it says who is at fault ([`Fault`]) and
//! with which status the command line exits. The message says what was
//! expected, what was found and where, in lower case and without a full stop;
//! the hint says what to do.

use std::fmt;
use std::path::PathBuf;

/// What every fallible function of this crate returns.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Who has to act.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Fault {
    /// The checkpoint, the recipe or the parameters are wrong, or do not fit.
    Input,
    /// The machine, the store, the device or the network.
    Environment,
    /// The module cannot run here, or did what it must not.
    Module,
}

impl Fault {
    /// The command line's exit status.
    pub const fn exit_status(self) -> u8 {
        match self {
            Fault::Input => 1,
            Fault::Environment => 3,
            Fault::Module => 4,
        }
    }
}

macro_rules! codes {
    ($( $fault:ident { $( $(#[$doc:meta])* $variant:ident $text:literal ),+ $(,)? } )+) => {
        /// What went wrong. The text form is stable: more may be added, none renamed.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Code { $( $( $(#[$doc])* $variant, )+ )+ }

        impl Code {
            /// Every code.
            pub const ALL: &[Code] = &[ $( $( Code::$variant, )+ )+ ];

            /// The stable text.
            pub const fn as_str(self) -> &'static str {
                match self { $( $( Code::$variant => $text, )+ )+ }
            }

            /// Who has to act.
            pub const fn fault(self) -> Fault {
                match self { $( $( Code::$variant )|+ => Fault::$fault, )+ }
            }
        }
    };
}

codes! {
    Input {
        /// A file of the checkpoint is malformed, or its files contradict each other.
        CheckpointInvalid "checkpoint_invalid",
        /// A source file changed while it was used.
        SourceChanged "source_changed",
        /// The source that an entry was made from is not at hand.
        SourceUnavailable "source_unavailable",
        /// The recipe is malformed.
        RecipeInvalid "recipe_invalid",
        /// No such module.
        ModuleNotFound "module_not_found",
        /// A module's source does not build.
        ModuleBuildFailed "module_build_failed",
        /// A golden vector of a module is malformed.
        VectorInvalid "vector_invalid",
        /// A `$config` key, or config.json itself, is missing.
        MissingConfig "missing_config",
        /// An application lacks a role.
        MissingInput "missing_input",
        /// A step applies to nothing.
        StepMatchedNothing "step_matched_nothing",
        /// A tensor that no step takes, where the recipe forbids that.
        UnmatchedTensor "unmatched_tensor",
        /// A name would stand twice in the result.
        DuplicateOutput "duplicate_output",
        /// A tensor name that is refused.
        BadTensorName "bad_tensor_name",
        /// Wrong parameters.
        BadParams "bad_params",
        /// A module refuses its inputs, or the tensor parallel size.
        ModuleRejectedInput "module_rejected_input",
        /// A value that a transform cannot take, such as a NaN.
        BadData "bad_data",
        /// A tie to a tensor that is not there.
        TieInvalid "tie_invalid",
        /// A file that is no statement, envelope, signature or key as expected.
        AttestationInvalid "attestation_invalid",
    }
    Environment {
        /// A lock was not free in time.
        LockTimeout "lock_timeout",
        /// Not enough disk space.
        InsufficientDisk "insufficient_disk",
        /// Not enough memory in the budget.
        InsufficientMemory "insufficient_memory",
        /// A store on a network or FUSE filesystem.
        UnsupportedFilesystem "unsupported_filesystem",
        /// The operating system refused.
        IoError "io_error",
        /// The user, or a supervisor, asked to stop.
        Interrupted "interrupted",
        /// A blob of the store is not what its name says.
        CorruptBlob "corrupt_blob",
        /// One key, two contents.
        IdentityCollision "identity_collision",
        /// No such device.
        NoDevice "no_device",
        /// Memory could not be registered with the device.
        RegistrationFailed "registration_failed",
        /// A registration did not return.
        RegistrationHung "registration_hung",
        /// More bytes than may be pinned.
        PinLimitExceeded "pin_limit_exceeded",
        /// The network failed.
        NetworkError "network_error",
        /// The registry said no.
        RegistryRefused "registry_refused",
        /// The registry did not answer in time.
        RegistryTimeout "registry_timeout",
        /// Bytes from elsewhere are not what their digest says.
        DigestMismatch "digest_mismatch",
        /// An entry from elsewhere that nothing vouches for.
        EntryNotTrusted "entry_not_trusted",
    }
    Module {
        /// The module has imports.
        ModuleHasImports "module_has_imports",
        /// The module uses a WebAssembly feature that is off.
        ModuleUnsupportedFeature "module_unsupported_feature",
        /// The module does not follow the ABI.
        ModuleBadAbi "module_bad_abi",
        /// The module, or something in it, is over a size limit.
        ModuleTooLarge "module_too_large",
        /// The module ran out of fuel.
        ModuleOutOfFuel "module_out_of_fuel",
        /// The module asked for more memory than it may have.
        ModuleOutOfMemory "module_out_of_memory",
        /// The module trapped or panicked.
        ModuleTrapped "module_trapped",
        /// An answer that is no well-formed document.
        ModuleBadAnswer "module_bad_answer",
        /// A plan that does not describe its outputs exactly.
        ModuleBadPlan "module_bad_plan",
        /// A module that nothing vouches for.
        ModuleNotTrusted "module_not_trusted",
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Where in a text file an error is. Lines and columns count from 1; columns
/// count characters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Location {
    /// The file, as the user named it.
    pub file: PathBuf,
    /// Line, from 1.
    pub line: u32,
    /// Column, from 1.
    pub column: u32,
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.file.display(), self.line, self.column)
    }
}

/// An error with a stable code.
#[derive(Clone, PartialEq, Eq)]
pub struct Error(Box<Body>);

#[derive(Clone, PartialEq, Eq)]
struct Body {
    code: Code,
    message: String,
    hint: Option<String>,
    at: Option<Location>,
}

impl Error {
    /// An error of `code`.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Error(Box::new(Body { code, message: printable(message.into()), hint: None, at: None }))
    }

    /// An `io_error` that says what was being done.
    pub fn io(doing: impl fmt::Display, cause: impl fmt::Display) -> Self {
        Error::new(Code::IoError, format!("{doing}: {cause}"))
    }

    /// Adds what to do about it.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.0.hint = Some(printable(hint.into()));
        self
    }

    /// Adds lines to the hint, such as a piece of a file to be copied.
    #[must_use]
    pub fn hint_lines<S: Into<String>>(mut self, lines: impl IntoIterator<Item = S>) -> Self {
        let hint = self.0.hint.get_or_insert_default();
        for line in lines {
            hint.push('\n');
            hint.push_str(&printable(line.into()));
        }
        self
    }

    /// Adds where it is, unless that is known already.
    #[must_use]
    pub fn at(mut self, at: Location) -> Self {
        self.0.at.get_or_insert(at);
        self
    }

    /// Puts `context` and a colon before the message.
    #[must_use]
    pub fn context(mut self, context: impl fmt::Display) -> Self {
        self.0.message = printable(format!("{context}: {}", self.0.message));
        self
    }

    /// The stable code.
    pub fn code(&self) -> Code {
        self.0.code
    }

    /// What was expected and what was found.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// What to do.
    pub fn hint_text(&self) -> Option<&str> {
        self.0.hint.as_deref()
    }

    /// Where it is.
    pub fn location(&self) -> Option<&Location> {
        self.0.at.as_ref()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(at) = &self.0.at {
            write!(f, "{at}: ")?;
        }
        write!(f, "{} ({})", self.0.message, self.0.code)?;
        if let Some(hint) = &self.0.hint {
            write!(f, "\nhint: {hint}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Error {}

/// A text that is safe to print, whatever it quotes from a hostile file: control
/// characters and what turns the direction of writing are escaped, and it ends.
fn printable(text: String) -> String {
    const MAX_BYTES: usize = 8192;
    let hostile = |c: char| c.is_control() || matches!(c, '\u{202A}'..='\u{202E}' | '\u{2066}'..='\u{2069}');
    if text.len() <= MAX_BYTES && !text.contains(hostile) {
        return text;
    }
    let mut safe = String::new();
    for c in text.chars() {
        if safe.len() > MAX_BYTES {
            safe.push('…');
            break;
        }
        if hostile(c) {
            safe.extend(c.escape_default());
        } else {
            safe.push(c);
        }
    }
    safe
}

/// The name of `candidates` nearest to `name`, if any is near enough to be
/// what was meant.
pub fn nearest<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let measured = candidates.into_iter().map(|c| {
        let longer = name.len().max(c.len());
        (strsim::damerau_levenshtein(name, c), longer, name.len().abs_diff(c.len()), c)
    });
    measured
        .filter(|(distance, longer, ..)| *distance <= (longer / 3).max(1) && distance < longer)
        .min_by_key(|(distance, _, length, c)| (*distance, *length, *c))
        .map(|(.., c)| c)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_distinct_and_in_snake_case() {
        let mut texts: Vec<_> = Code::ALL.iter().map(|c| c.as_str()).collect();
        texts.sort_unstable();
        texts.dedup();
        assert_eq!(texts.len(), Code::ALL.len());
        assert!(texts.iter().all(|t| t.bytes().all(|b| b.is_ascii_lowercase() || b == b'_')));
    }

    #[test]
    fn the_first_location_wins() {
        let at = |line| Location { file: "r.toml".into(), line, column: 1 };
        let error = Error::new(Code::BadParams, "no").at(at(3)).at(at(9));
        assert_eq!(error.location(), Some(&at(3)));
        assert_eq!(error.to_string(), "r.toml:3:1: no (bad_params)");
    }

    #[test]
    fn whatever_is_quoted_is_safe_to_print_and_bounded() {
        let hostile = "a\u{1b}[2J\nb\u{202e}";
        let error = Error::new(Code::BadParams, hostile).hint(hostile).context(hostile);
        let escaped = r"a\u{1b}[2J\nb\u{202e}";
        assert_eq!(error.message(), format!("{escaped}: {escaped}"));
        assert_eq!(error.hint_text(), Some(escaped));
        let lines = error.hint_lines(["[[x]]", "a\nb"]);
        assert_eq!(lines.hint_text(), Some(format!("{escaped}\n[[x]]\na\\nb").as_str()));
        let long = Error::new(Code::BadParams, "\u{1}".repeat(100_000)).context("\u{2}".repeat(100_000));
        assert!(long.message().len() < 9000 && long.message().ends_with('…'));
    }

    #[test]
    fn nearest_finds_slips_only() {
        assert_eq!(nearest("grups", ["groups", "order"]), Some("groups"));
        assert_eq!(nearest("namez", ["name", "names"]), Some("names"));
        assert_eq!(nearest("zzz", ["groups", "order"]), None);
        assert_eq!(nearest("y", ["a"]), None);
    }
}
