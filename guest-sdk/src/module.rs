//! What a transform is, and how the ABI's calls reach it.

use alloc::format;
use alloc::string::String;

use crate::abi::{ABI_VERSION, PlanAnswer, RunError};
use crate::error::{DataError, PlanError, Result};
use crate::json::Value;
use crate::outputs::Outputs;
use crate::params::Params;
use crate::plan::Plan;
use crate::tile::Tile;
use crate::wire::Request;

/// The part of a module that the attribute macro
/// [`transform`](weightmill_guest_macros::transform) writes.
///
/// ```
/// use weightmill_guest::abi::Metadata;
/// use weightmill_guest::prelude::*;
///
/// #[transform(name = "first-rows", version = "1.2.0", uses_tp)]
/// struct FirstRows {
///     rows: u64,
/// }
/// let metadata: Metadata = serde_json::from_str(FirstRows::METADATA).unwrap();
/// assert_eq!((metadata.name.as_str(), metadata.uses_tp, FirstRows::PARAMS), ("first-rows", true, &["rows"][..]));
/// ```
pub trait Module: Sized {
    /// The metadata section: the JSON text of [`Metadata`](crate::abi::Metadata).
    const METADATA: &'static str;
    /// The names of all parameters.
    const PARAMS: &'static [&'static str];

    /// The transform with these parameters.
    ///
    /// # Errors
    /// If one is missing or of another type.
    fn from_params(params: &Params<'_>) -> Result<Self>;
}

/// A transform: a struct of parameters that plans, and computes tiles if its
/// plan has any.
///
/// ```
/// use weightmill_guest::prelude::*;
///
/// /// Turns a matrix.
/// #[transform(name = "turn", version = "1.0.0", summary = "turns a matrix")]
/// pub struct Turn {}
///
/// impl Transform for Turn {
///     fn plan(&self, cx: &Plan) -> Result<Outputs> {
///         let w = cx.input("w")?;
///         cx.outputs().view("w", w.permute(&[1, 0])?)
///     }
/// }
/// # use weightmill_guest::native::{Case, Tensor};
/// let turned = Case::new().input("w", Tensor::of(&[2, 3], &[1_u8, 2, 3, 4, 5, 6])).run::<Turn>().unwrap();
/// assert_eq!(turned["w"].bytes, [1, 4, 2, 5, 3, 6]);
/// ```
pub trait Transform: Module {
    /// What is made of the inputs, from their dtypes and shapes alone.
    ///
    /// # Errors
    /// If the parameters, the inputs or the tensor parallel size do not fit.
    fn plan(&self, cx: &Plan) -> Result<Outputs>;

    /// Computes one tile. A view needs none.
    ///
    /// # Errors
    /// If the data holds a value that the transform cannot take.
    fn run(&self, tile: &mut Tile) -> Result<(), DataError> {
        Err(DataError::new(format!("this transform computes no tiles, but was given one of tensor {}", tile.target())))
    }
}

/// Answers a plan request.
pub fn plan<T: Transform>(request: &Request) -> PlanAnswer {
    match try_plan::<T>(request) {
        Ok(outputs) => outputs.finish(),
        Err(error) => PlanAnswer::Error { error: error.into_body() },
    }
}

fn try_plan<T: Transform>(request: &Request) -> Result<Outputs> {
    if request.abi != ABI_VERSION {
        return Err(PlanError::param("", format!("this module speaks ABI {ABI_VERSION}, not {}", request.abi)));
    }
    let transform = parse::<T>(&request.params)?;
    let cx = Plan::new(request);
    let outputs = transform.plan(&cx)?;
    cx.check(&outputs)?;
    Ok(outputs)
}

/// Computes a tile.
///
/// # Errors
/// What the transform says of the data.
pub fn run<T: Transform>(params: &Value, tile: &mut Tile<'_>) -> Result<(), RunError> {
    let transform = parse::<T>(params).map_err(|error| DataError::new(String::from(error.message())).into_body())?;
    transform.run(tile).map_err(DataError::into_body)
}

fn parse<T: Module>(params: &Value) -> Result<T> {
    T::from_params(&Params::new(params, T::PARAMS)?)
}

#[cfg(test)]
mod tests {
    use crate::native::{Case, Refused, Tensor};
    use crate::prelude::*;

    #[transform(name = "every-kind", version = "1.0.0", summary = "all kinds of parameters", uses_tp)]
    struct EveryKind {
        count: NonZeroU64,
        strict: bool,
        mode: Option<Mode>,
        #[param(default = 0.5)]
        scale: f64,
        #[param(default = vec![1], rename = "type")]
        kind: Vec<u64>,
        r#as: Option<String>,
    }

    #[derive(Clone, Copy, Debug, PartialEq, Eq, Choice)]
    enum Mode {
        Fast,
        #[choice("2-pass")]
        TwoPass,
    }

    impl Transform for EveryKind {
        fn plan(&self, cx: &Plan) -> Result<Outputs> {
            let w = cx.input("w")?;
            let seen = format!(
                "{} {} {:?} {} {:?} {:?}",
                self.count, self.strict, self.mode, self.scale, self.kind, self.r#as
            );
            Err(w.refuse(seen))
        }
    }

    fn seen(case: Case) -> String {
        case.input("w", Tensor::of(&[1], &[0_u8])).run::<EveryKind>().unwrap_err().message().into()
    }

    #[test]
    fn parameters_have_their_defaults_and_names() {
        assert_eq!(seen(Case::new().param("count", 3)), "3 false None 0.5 [1] None");
        let all = Case::new().param("count", 3).param("strict", true).param("mode", "2-pass").param("scale", 2);
        let all = all.param("type", vec![4, 5]).param("as", "x");
        assert_eq!(seen(all), "3 true Some(TwoPass) 2 [4, 5] Some(\"x\")");
        assert_eq!(EveryKind::PARAMS, ["count", "strict", "mode", "scale", "type", "as"]);
        let why = "the parameter mode must be \"fast\" or \"2-pass\", found \"slow\"";
        assert_eq!(seen(Case::new().param("count", 3).param("mode", "slow")), why);
        assert_eq!(seen(Case::new()), "the parameter count is missing: it must be a whole number of at least 1");
        assert_eq!(seen(Case::new().param("kind", 3)), "there is no parameter kind");
    }

    #[test]
    fn a_transform_without_tiles_refuses_one() {
        let mut out = [0; 0];
        let mut tile = Tile::new(Default::default(), vec![], &[], &mut out);
        let params = crate::json::Value::parse(br#"{"count":1}"#).unwrap();
        let error = super::run::<EveryKind>(&params, &mut tile).unwrap_err();
        assert!(error.message.starts_with("this transform computes no tiles"), "{error:?}");
        let error = super::run::<EveryKind>(&crate::json::Value::Null, &mut tile).unwrap_err();
        assert_eq!(error.message, "expected an object of parameters, found null");
    }

    #[transform(name = "picky", version = "1.0.0")]
    struct Picky;

    impl Transform for Picky {
        fn plan(&self, cx: &Plan) -> Result<Outputs> {
            cx.optional("b")?;
            cx.outputs().view("w", cx.input("a")?)
        }
    }

    #[test]
    fn inputs_and_outputs_that_a_transform_does_not_know_are_refused() {
        let case = || Case::new().input("a", Tensor::of(&[1], &[7_u8]));
        assert_eq!(case().output("w").run::<Picky>().unwrap()["w"].bytes, [7]);
        let refused = case().input("c", Tensor::of(&[1], &[7_u8])).run::<Picky>().unwrap_err();
        assert_eq!((refused.message(), refused.hint()), ("this transform takes no input c here", "it uses a"));
        let refused = case().output("x").run::<Picky>().unwrap_err();
        assert_eq!((refused.message(), refused.hint()), ("this transform makes no output x here", "it makes w"));
        let Err(Refused::Plan(error)) = case().input("a", Tensor::of(&[1], &[8_u8])).run::<Picky>() else { panic!() };
        assert_eq!(error.message, "expected one tensor in a, found a list of 2");
    }
}
