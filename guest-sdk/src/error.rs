//! Why a transform refuses: [`PlanError`] from metadata alone, [`DataError`]
//! from the values.

use alloc::string::{String, ToString};

use crate::abi::{PlanErrorBody, PlanErrorKind, RunError};

/// What `plan` and everything it calls return.
///
/// ```
/// use weightmill_guest::prelude::*;
///
/// fn even(n: u64) -> Result<u64> {
///     if n.is_multiple_of(2) { Ok(n / 2) } else { Err(PlanError::param("n", format!("n must be even, found {n}"))) }
/// }
/// assert!(even(3).is_err());
/// ```
pub type Result<T, E = PlanError> = core::result::Result<T, E>;

/// The texts of `items` with `separator` between them.
pub(crate) fn separated<T: ToString>(items: &[T], separator: &str) -> String {
    let mut text = String::new();
    for (k, item) in items.iter().enumerate() {
        if k > 0 {
            text.push_str(separator);
        }
        text.push_str(&item.to_string());
    }
    text
}

/// Why a transform does not plan: what was expected and what was found, in
/// lower case and without a full stop, and a hint that says what to do.
///
/// ```
/// use weightmill_guest::prelude::*;
///
/// let error = PlanError::input("w", "expected 2 dimensions, found 3").hint("use `permute` first");
/// assert_eq!(error.message(), "expected 2 dimensions, found 3");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanError(PlanErrorBody);

impl PlanError {
    fn new(kind: PlanErrorKind, message: impl Into<String>) -> Self {
        PlanError(PlanErrorBody { kind, param: None, role: None, message: message.into(), hint: None })
    }

    /// The parameter `param` is wrong: the recipe's author has to act.
    ///
    /// ```
    /// # use weightmill_guest::prelude::*;
    /// let error = PlanError::param("groups", "must be at least 1, found 0");
    /// assert_eq!(error.body().param.as_deref(), Some("groups"));
    /// ```
    pub fn param(param: impl Into<String>, message: impl Into<String>) -> Self {
        let mut error = PlanError::new(PlanErrorKind::Params, message);
        error.0.param = Some(param.into());
        error
    }

    /// The tensor in `role` does not fit.
    ///
    /// ```
    /// # use weightmill_guest::prelude::*;
    /// assert_eq!(PlanError::input("w", "must be BF16").body().role.as_deref(), Some("w"));
    /// ```
    pub fn input(role: impl Into<String>, message: impl Into<String>) -> Self {
        let mut error = PlanError::new(PlanErrorKind::Input, message);
        error.0.role = Some(role.into());
        error
    }

    /// The tensor parallel size does not fit.
    ///
    /// ```
    /// # use weightmill_guest::prelude::*;
    /// let error = PlanError::tp("12 heads do not divide by the tp size 8").hint("use a tp size of 4");
    /// assert_eq!(error.body().hint.as_deref(), Some("use a tp size of 4"));
    /// ```
    pub fn tp(message: impl Into<String>) -> Self {
        PlanError::new(PlanErrorKind::Tp, message)
    }

    /// Adds what to do about it.
    ///
    /// ```
    /// # use weightmill_guest::prelude::*;
    /// assert!(PlanError::tp("no").hint("yes").body().hint.is_some());
    /// ```
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.0.hint = Some(hint.into());
        self
    }

    /// What was expected and what was found.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// The error as the ABI spells it.
    pub fn body(&self) -> &PlanErrorBody {
        &self.0
    }

    /// The error as the ABI spells it.
    pub fn into_body(self) -> PlanErrorBody {
        self.0
    }
}

impl core::fmt::Display for PlanError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(&self.0.message)
    }
}

impl core::error::Error for PlanError {}

/// A value that a transform cannot take.
///
/// Of several the host reports that of the first tile, and `run` should
/// answer with the lowest flat index of its tile, so that the text does not
/// depend on threads.
///
/// ```
/// use weightmill_guest::prelude::*;
///
/// let error = DataError::at("w", 9, "NaN at flat index 9 of w cannot be quantised").hint("check the checkpoint");
/// assert_eq!(error.body().index, Some(9));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataError(RunError);

impl DataError {
    /// An error about the tile as a whole.
    ///
    /// ```
    /// # use weightmill_guest::prelude::*;
    /// assert_eq!(DataError::new("no row has a norm").body().index, None);
    /// ```
    pub fn new(message: impl Into<String>) -> Self {
        DataError(RunError { kind: String::from("data"), role: None, index: None, message: message.into(), hint: None })
    }

    /// The value at `index`, counted in elements over the whole tensor in
    /// `role`.
    ///
    /// ```
    /// # use weightmill_guest::prelude::*;
    /// assert_eq!(DataError::at("w", 3, "NaN").body().role.as_deref(), Some("w"));
    /// ```
    pub fn at(role: impl Into<String>, index: u64, message: impl Into<String>) -> Self {
        let mut error = DataError::new(message);
        error.0.role = Some(role.into());
        error.0.index = Some(index);
        error
    }

    /// Adds what to do about it.
    ///
    /// ```
    /// # use weightmill_guest::prelude::*;
    /// assert!(DataError::new("no").hint("yes").body().hint.is_some());
    /// ```
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.0.hint = Some(hint.into());
        self
    }

    /// The error as the ABI spells it.
    pub fn body(&self) -> &RunError {
        &self.0
    }

    /// The error as the ABI spells it.
    pub fn into_body(self) -> RunError {
        self.0
    }
}

impl core::fmt::Display for DataError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(&self.0.message)
    }
}

impl core::error::Error for DataError {}
