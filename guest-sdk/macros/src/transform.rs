//! `#[transform(…)]`.

use proc_macro2::{Literal, TokenStream};
use quote::quote;
use syn::ext::IdentExt;
use syn::{Error, Expr, Field, Fields, ItemStruct, LitStr, Result, Type};

use crate::metadata::Metadata;

pub(crate) fn expand(metadata: &Metadata, mut item: ItemStruct) -> Result<TokenStream> {
    if !item.generics.params.is_empty() {
        return Err(Error::new_spanned(&item.generics, "a transform has no type parameters"));
    }
    let mut names = Vec::new();
    let mut values = Vec::new();
    match &mut item.fields {
        Fields::Unit => {}
        Fields::Named(fields) => {
            for field in &mut fields.named {
                let param = Param::take(field)?;
                let (ident, name) = (&field.ident, param.name.clone());
                if names.contains(&name) {
                    return Err(Error::new_spanned(field, format!("there are two parameters {name}")));
                }
                let value = param.value(&field.ty);
                values.push(quote!(#ident: #value));
                names.push(name);
            }
        }
        Fields::Unnamed(fields) => return Err(Error::new_spanned(fields, "parameters have names")),
    }
    let (name, json) = (&item.ident, metadata.to_json());
    let section = Literal::byte_string(json.as_bytes());
    let section_len = json.len();
    Ok(quote! {
        #item

        impl ::weightmill_guest::module::Module for #name {
            const METADATA: &'static str = #json;
            const PARAMS: &'static [&'static str] = &[#(#names),*];

            fn from_params(params: &::weightmill_guest::params::Params<'_>) -> ::weightmill_guest::error::Result<Self> {
                let _ = params;
                ::core::result::Result::Ok(Self { #(#values),* })
            }
        }

        #[cfg(target_arch = "wasm32")]
        const _: () = {
            #[unsafe(link_section = "weightmill")]
            #[used]
            static METADATA: [u8; #section_len] = *#section;

            #[unsafe(no_mangle)]
            extern "C" fn wm_plan(request: u32, len: u32) -> i64 {
                ::weightmill_guest::glue::plan::<#name>(request, len)
            }

            #[unsafe(no_mangle)]
            extern "C" fn wm_run(block: u32) -> i64 {
                ::weightmill_guest::glue::run::<#name>(block)
            }
        };
    })
}

/// One field: its name in recipes, and what it is when left out.
struct Param {
    name: String,
    default: Option<Expr>,
}

impl Param {
    /// Takes the `#[param(…)]` attributes off a field.
    fn take(field: &mut Field) -> Result<Self> {
        let name = field.ident.as_ref().map(|ident| ident.unraw().to_string()).unwrap_or_default();
        let mut param = Param { name, default: None };
        let (own, others) = field.attrs.drain(..).partition(|attr| attr.path().is_ident("param"));
        field.attrs = others;
        let own: Vec<syn::Attribute> = own;
        for attr in own {
            attr.parse_nested_meta(|meta| {
                if meta.path.is_ident("default") {
                    param.default = Some(meta.value()?.parse()?);
                } else if meta.path.is_ident("rename") {
                    param.name = meta.value()?.parse::<LitStr>()?.value();
                } else {
                    return Err(meta.error("expected default = … or rename = \"…\""));
                }
                Ok(())
            })?;
        }
        Ok(param)
    }

    fn value(&self, ty: &Type) -> TokenStream {
        let name = &self.name;
        match (&self.default, last_segment(ty).as_deref()) {
            (Some(default), _) => quote!(match params.optional(#name)? {
                ::core::option::Option::Some(value) => value,
                ::core::option::Option::None => #default,
            }),
            (None, Some("Option")) => quote!(params.optional(#name)?),
            (None, Some("bool")) => quote!(params.optional(#name)?.unwrap_or(false)),
            (None, _) => quote!(params.required(#name)?),
        }
    }
}

fn last_segment(ty: &Type) -> Option<String> {
    match ty {
        Type::Path(path) => path.path.segments.last().map(|segment| segment.ident.to_string()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn try_expand(item: &str) -> Result<String> {
        let metadata = syn::parse_str(r#"name = "a", version = "1.0.0""#)?;
        expand(&metadata, syn::parse_str(item)?).map(|tokens| tokens.to_string())
    }

    #[test]
    fn fields_are_required_unless_they_say_otherwise() {
        let code =
            try_expand("struct A { a: u64, b: bool, c: Option<u64>, #[param(default = 3, rename = \"x\")] d: u64 }");
        let code = code.unwrap();
        assert!(code.contains("a : params . required (\"a\") ?"), "{code}");
        assert!(code.contains("b : params . optional (\"b\") ? . unwrap_or (false)"), "{code}");
        assert!(code.contains("c : params . optional (\"c\") ?"), "{code}");
        assert!(code.contains("d : match params . optional (\"x\") ?"), "{code}");
        assert!(!code.contains("# [param"), "{code}");
    }

    #[test]
    fn what_is_no_list_of_parameters_is_refused() {
        for item in [
            "struct A(u64);",
            "struct A<T> { a: T }",
            "struct A { #[param(size = 3)] a: u64 }",
            "struct A { #[param(rename = \"b\")] a: u64, b: u64 }",
        ] {
            assert!(try_expand(item).is_err(), "{item}");
        }
    }
}
