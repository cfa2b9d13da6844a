//! The header of a safetensors file, and the index beside it.

use weightmill::checkpoint::{header, parse_index};
use weightmill::error::Fault;

use super::check_error;

/// The first two bytes are the length of the data, the rest is the header's
/// text, which is also tried as an index.
pub(super) fn run(input: &[u8]) {
    if let Some(prefix) = input.first_chunk::<{ header::PREFIX_BYTES }>()
        && let Err(error) = header::header_len(input.len() as u64, *prefix)
    {
        check_error(&error, Fault::Input);
    }
    let Some((data_len, text)) = input.split_first_chunk::<2>() else { return };
    if let Err(error) = parse_index(text) {
        check_error(&error, Fault::Input);
    }
    let data_len = u64::from(u16::from_le_bytes(*data_len));
    let file_len = header::PREFIX_BYTES as u64 + text.len() as u64 + data_len;
    match header::parse(file_len, text) {
        Err(error) => check_error(&error, Fault::Input),
        Ok(header) => accepted(&header, file_len, text),
    }
}

/// What is accepted means one thing only: the tensors and the fillers are all
/// of the data, and the stock reader sees the same tensors.
fn accepted(header: &header::Header, file_len: u64, text: &[u8]) {
    let named: u64 = header.tensors.values().map(|place| place.tensor.len_bytes()).sum();
    assert_eq!(header.data_start + named + header.filler_bytes, file_len);
    let mut file = (text.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(text);
    file.resize(file_len as usize, 0);
    let stock = safetensors::SafeTensors::deserialize(&file).expect("the stock reader accepts it too");
    for (name, place) in &header.tensors {
        let view = stock.tensor(name.as_str()).expect("the stock reader has the tensor");
        let begin = view.data().as_ptr() as u64 - file.as_ptr() as u64;
        let shape: Vec<u64> = view.shape().iter().map(|&extent| extent as u64).collect();
        assert_eq!((shape.as_slice(), view.data().len() as u64), (place.tensor.shape(), place.tensor.len_bytes()));
        assert!(view.data().is_empty() || begin == place.offset, "{name} is at {begin} and at {}", place.offset);
    }
}
