//! The attribute macro [`macro@transform`] and the derive [`macro@Choice`] of
//! the weightmill guest SDK. Use them through `weightmill_guest::prelude`,
//! where they are explained.

mod choice;
mod metadata;
mod transform;

use proc_macro::TokenStream;
use syn::parse_macro_input;

/// Makes a struct of parameters a module.
///
/// ```text
/// #[transform(name = "head-repeat", version = "1.0.0", summary = "one line", uses_tp, fuel_per_byte = 64)]
/// pub struct HeadRepeat {
///     num_heads: u64,            // required
///     #[param(default = 2)]
///     times: u64,                // may be left out
///     order: Option<Order>,      // may be left out
///     strict: bool,              // may be left out: false
///     #[param(rename = "to")]
///     target: String,            // another name in recipes
/// }
/// ```
///
/// Arguments: `name` (lower-case letters, digits and dashes) and `version`
/// (three numbers) are required; `summary`, `source`, `licence` (texts),
/// `uses_tp` (the plan depends on tensor parallel size and rank) and
/// `fuel_per_byte` (default 64) are not.
///
/// It writes the parameter parser; on WebAssembly also the metadata section
/// and the exports `wm_plan` and `wm_run`. The struct needs
/// `impl Transform for …`.
#[proc_macro_attribute]
pub fn transform(args: TokenStream, item: TokenStream) -> TokenStream {
    let args = parse_macro_input!(args as metadata::Metadata);
    let item = parse_macro_input!(item as syn::ItemStruct);
    transform::expand(&args, item).unwrap_or_else(syn::Error::into_compile_error).into()
}

/// Makes an enum without fields a parameter type. Its words are the variants'
/// names in lower case with dashes (`HalfSwap` is `"half-swap"`), or what
/// `#[choice("…")]` on a variant says.
#[proc_macro_derive(Choice, attributes(choice))]
pub fn choice(item: TokenStream) -> TokenStream {
    let item = parse_macro_input!(item as syn::DeriveInput);
    choice::expand(&item).unwrap_or_else(syn::Error::into_compile_error).into()
}
