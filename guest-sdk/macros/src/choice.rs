//! `#[derive(Choice)]`.

use proc_macro2::TokenStream;
use quote::quote;
use syn::{Data, DeriveInput, Error, Fields, LitStr, Result, Variant};

pub(crate) fn expand(item: &DeriveInput) -> Result<TokenStream> {
    let Data::Enum(data) = &item.data else {
        return Err(Error::new_spanned(item, "a choice is an enum without fields"));
    };
    let name = &item.ident;
    let mut rows = Vec::new();
    for variant in &data.variants {
        if !matches!(variant.fields, Fields::Unit) {
            return Err(Error::new_spanned(variant, "a choice is an enum without fields"));
        }
        let (word, ident) = (word(variant)?, &variant.ident);
        rows.push(quote!((#word, #name::#ident)));
    }
    Ok(quote! {
        impl ::weightmill_guest::params::Choice for #name {
            const CHOICES: &'static [(&'static str, Self)] = &[#(#rows),*];
        }

        impl ::weightmill_guest::params::FromParam for #name {
            fn expected() -> ::weightmill_guest::prelude::String {
                ::weightmill_guest::params::expected_choice::<Self>()
            }

            fn from_param(value: &::weightmill_guest::params::Value) -> ::core::option::Option<Self> {
                ::weightmill_guest::params::find_choice(value)
            }
        }
    })
}

fn word(variant: &Variant) -> Result<String> {
    match variant.attrs.iter().find(|attr| attr.path().is_ident("choice")) {
        Some(attr) => Ok(attr.parse_args::<LitStr>()?.value()),
        None => Ok(kebab(&variant.ident.to_string())),
    }
}

fn kebab(name: &str) -> String {
    let mut word = String::new();
    for (k, c) in name.chars().enumerate() {
        if c.is_uppercase() && k > 0 {
            word.push('-');
        }
        word.extend(c.to_lowercase());
    }
    word
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_lower_case_with_dashes() {
        assert_eq!(kebab("Qkv"), "qkv");
        assert_eq!(kebab("HalfSwap"), "half-swap");
        assert_eq!(kebab("W1w3"), "w1w3");
    }

    #[test]
    fn only_plain_enums_are_choices() {
        for item in ["struct A;", "enum A { B(u8) }"] {
            assert!(expand(&syn::parse_str(item).unwrap()).is_err(), "{item}");
        }
    }
}
