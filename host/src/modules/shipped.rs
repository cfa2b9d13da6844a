/// A module that is part of the program.
#[derive(Clone, Copy, Debug)]
pub struct Shipped {
    /// Its name in recipes.
    pub name: &'static str,
    /// The committed artefact.
    pub bytes: &'static [u8],
}

macro_rules! shipped {
    ($( $name:literal ),+ $(,)?) => {
        /// Every shipped module, ascending by name.
        pub const SHIPPED: &[Shipped] = &[ $( Shipped {
            name: $name,
            bytes: include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/../transforms/dist/", $name, ".wasm")),
        }, )+ ];
    };
}

shipped![
    "awq-dequantize",
    "cast",
    "concat",
    "fp8-dequantize",
    "fp8-fnuz",
    "fp8-quantize",
    "gate-up",
    "gptq-dequantize",
    "lora-merge",
    "moe-stack",
    "mxfp4-dequantize",
    "pad-head",
    "permute",
    "qkv-fuse",
    "qkv-regroup",
    "qkv-split",
    "rope-permute",
    "slice",
    "tp-shard",
    "weight-norm-fold",
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sandbox::Module;

    #[test]
    fn every_shipped_module_is_sound_and_named_as_it_says() {
        assert!(SHIPPED.windows(2).all(|w| w[0].name < w[1].name));
        for shipped in SHIPPED {
            let module = Module::parse(shipped.bytes).unwrap();
            assert_eq!(module.metadata().name, shipped.name);
        }
    }
}
