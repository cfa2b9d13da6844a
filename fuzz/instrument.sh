#!/bin/sh
# A RUSTC_WRAPPER: compiles for libFuzzer's feedback what is under test, and
# leaves the compilers and interpreters of WebAssembly as they are. Works with
# the pinned toolchain. `cargo fuzz` instruments everything by itself instead.
rustc=$1
shift
previous=
for argument in "$@"; do
    if [ "$previous" = --crate-name ]; then
        case $argument in
        weightmill | weightmill_guest | weightmill_tests | toml | toml_parser | wasm_smith | header | host | module | plan | recipe)
            exec "$rustc" "$@" -Ccodegen-units=1 -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
                -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
                -Cllvm-args=-sanitizer-coverage-trace-compares
            ;;
        esac
    fi
    previous=$argument
done
exec "$rustc" "$@"
