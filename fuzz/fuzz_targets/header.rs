#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| weightmill_tests::fuzz::run("header", input));
