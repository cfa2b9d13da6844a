#!/bin/sh
# Builds widen.wasm in the folder $1 (default: this one). $WEIGHTMILL is the
# program; $CLANG the compiler, which needs wasm-ld beside it.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-$here}
"${CLANG:-clang}" --target=wasm32-unknown-unknown -std=c11 -O2 -Wall -Wextra -Werror -msimd128 -mbulk-memory \
    -ffreestanding -nostdlib -Wl,--no-entry -Wl,--export=wm_panic -Wl,--strip-all -Wl,-z,stack-size=65536 \
    -o "$out/widen.raw.wasm" "$here/widen.c"
"${WEIGHTMILL:-weightmill}" module pack --meta "$here/widen.json" "$out/widen.raw.wasm" "$out/widen.wasm"
rm "$out/widen.raw.wasm"
