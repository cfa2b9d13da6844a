//! Folding a weight norm: `w = v · (g / ‖v‖₂)`, the norm a row.
//!
//! Operation order, in f32: the squares of a row are summed from the first
//! element on, in one accumulator that begins at 0 (a product, then a sum,
//! each rounded); one square root; one division `g / ‖v‖`; then for every
//! element one product, rounded to the format of `v`.
//!
//! A row's sum is one long chain of additions, so speed comes from several
//! rows at a time: a row a lane.

use super::{Float, canonical};

use super::lanes::*;

/// The sum of squares of each row of `v`; `sums` has an entry a row.
///
/// # Panics
/// If `v` is not that many equal rows.
///
/// ```
/// use weightmill_guest::kernels::{F32, weight_norm};
///
/// let mut sums = [0.0; 2];
/// weight_norm::sums_of_squares::<F32>(&[3.0, 4.0, 1.0, 2.0], &mut sums);
/// assert_eq!(sums, [25.0, 5.0]);
/// ```
pub fn sums_of_squares<F: Float>(v: &[F::Element], sums: &mut [f32]) {
    let row = v.len().checked_div(sums.len()).unwrap_or(0);
    assert_eq!(row * sums.len(), v.len(), "rows are equal");
    let done = if SIMD { sums_simd::<F>(v, row, sums) } else { sums_scalar_eights::<F>(v, row, sums) };
    sums_scalar::<F>(&v[done * row..], row, &mut sums[done..]);
}

/// The definition.
fn sums_scalar<F: Float>(v: &[F::Element], row: usize, sums: &mut [f32]) {
    for (i, sum) in sums.iter_mut().enumerate() {
        let squares = v[i * row..][..row].iter().map(|&x| F::decode(x) * F::decode(x));
        *sum = canonical(squares.fold(0.0, |sum, square| sum + square));
    }
}

/// As the definition, for eight rows at a time; answers for how many.
fn sums_scalar_eights<F: Float>(v: &[F::Element], row: usize, sums: &mut [f32]) -> usize {
    let (sums, _) = sums.as_chunks_mut::<8>();
    for (eight, sums) in sums.iter_mut().enumerate() {
        let rows: [&[F::Element]; 8] = core::array::from_fn(|i| &v[(eight * 8 + i) * row..][..row]);
        let mut sum = [0.0; 8];
        for column in 0..row {
            for (sum, row) in sum.iter_mut().zip(&rows) {
                let x = F::decode(row[column]);
                *sum += x * x;
            }
        }
        *sums = sum.map(canonical);
    }
    sums.len() * 8
}

/// As the definition, for eight rows at a time; answers for how many.
fn sums_simd<F: Float>(v: &[F::Element], row: usize, sums: &mut [f32]) -> usize {
    let (sums, _) = sums.as_chunks_mut::<8>();
    for (eight, sums) in sums.iter_mut().enumerate() {
        let rows: [&[F::Element]; 8] = core::array::from_fn(|i| &v[(eight * 8 + i) * row..][..row]);
        let chunks = rows.map(|row| row.as_chunks::<8>().0);
        let (mut low, mut high) = (f32x4_splat(0.0), f32x4_splat(0.0));
        for (eight, first) in chunks[0].iter().enumerate() {
            // Eight columns of four rows, twice: columns become vectors.
            let of_row = |row: usize| F::load8(&chunks[row][eight]);
            let ([a0, a1], [b0, b1], [c0, c1], [d0, d1]) = (F::load8(first), of_row(1), of_row(2), of_row(3));
            let ([e0, e1], [f0, f1], [g0, g1], [h0, h1]) = (of_row(4), of_row(5), of_row(6), of_row(7));
            (low, high) = (add_squares(low, [a0, b0, c0, d0]), add_squares(high, [e0, f0, g0, h0]));
            (low, high) = (add_squares(low, [a1, b1, c1, d1]), add_squares(high, [e1, f1, g1, h1]));
        }
        let sum = [low, high];
        let (low, high) = sums.split_at_mut(4);
        store::<f32, 4>(low.try_into().expect("4 of 8"), sum[0]);
        store::<f32, 4>(high.try_into().expect("4 of 8"), sum[1]);
        for (sum, rest) in sums.iter_mut().zip(rows.map(|row| row.as_chunks::<8>().1)) {
            let squares = rest.iter().map(|&x| F::decode(x) * F::decode(x));
            *sum = canonical(squares.fold(*sum, |sum, square| sum + square));
        }
    }
    sums.len() * 8
}

#[inline(always)]
fn transpose([a, b, c, d]: [v128; 4]) -> [v128; 4] {
    let (ab, cd) = ([zip32_low(a, b), zip32_high(a, b)], [zip32_low(c, d), zip32_high(c, d)]);
    [zip64_low(ab[0], cd[0]), zip64_high(ab[0], cd[0]), zip64_low(ab[1], cd[1]), zip64_high(ab[1], cd[1])]
}

/// Adds the squares of four columns of four rows, a column after the other.
#[inline(always)]
fn add_squares(sum: v128, rows: [v128; 4]) -> v128 {
    let [a, b, c, d] = transpose(rows);
    let sum = f32x4_add(sum, f32x4_mul(a, a));
    let sum = f32x4_add(sum, f32x4_mul(b, b));
    let sum = f32x4_add(sum, f32x4_mul(c, c));
    f32x4_add(sum, f32x4_mul(d, d))
}

/// `g / sqrt(sum)`: one square root, one division.
///
/// ```
/// assert_eq!(weightmill_guest::kernels::weight_norm::factor(10.0, 25.0), 2.0);
/// ```
pub fn factor(g: f32, sum: f32) -> f32 {
    canonical(g / sqrt(sum))
}

/// The correctly rounded square root, on integers: `core` has no square root,
/// and a row needs only one.
fn sqrt(x: f32) -> f32 {
    if x.is_nan() || x < 0.0 {
        return f32::from_bits(0x7fc0_0000);
    }
    if x == 0.0 || x == f32::INFINITY {
        return x;
    }
    // x = mantissa · 2^exponent, the mantissa made 24 bits.
    let bits = x.to_bits();
    let (mut mantissa, mut exponent) = (u64::from(bits & 0x007f_ffff), (bits >> 23) as i32 - 150);
    if bits >> 23 == 0 {
        let shift = mantissa.leading_zeros() - 40;
        mantissa <<= shift;
        exponent = -149 - shift as i32;
    } else {
        mantissa |= 1 << 23;
    }
    // 49 or 50 bits with an even exponent have a root of 25: one more than is
    // kept. The root of 24 bits never lies half-way between two numbers, so
    // the last bit alone says which is nearer.
    let shift = 25 + (exponent - 25).rem_euclid(2);
    let root = (mantissa << shift).isqrt();
    let exponent = (exponent - shift) / 2 + 1;
    let rounded = (root >> 1) + (root & 1);
    f32::from_bits(rounded as u32 + ((exponent + 149) << 23) as u32)
}

/// Every element of `v` times `factor`, rounded to its own format.
///
/// # Panics
/// If the slices differ in length.
///
/// ```
/// use weightmill_guest::kernels::{F32, weight_norm};
///
/// let mut w = [0.0; 2];
/// weight_norm::scale::<F32>(&[1.0, -2.0], 0.5, &mut w);
/// assert_eq!(w, [0.5, -1.0]);
/// ```
pub fn scale<F: Float>(v: &[F::Element], factor: f32, w: &mut [F::Element]) {
    assert_eq!(v.len(), w.len(), "a weight for every value");
    let done = if SIMD { scale_simd::<F>(v, factor, w) } else { 0 };
    scale_scalar::<F>(&v[done..], factor, &mut w[done..]);
}

fn scale_scalar<F: Float>(v: &[F::Element], factor: f32, w: &mut [F::Element]) {
    for (w, &v) in w.iter_mut().zip(v) {
        *w = F::encode(canonical(F::decode(v) * factor));
    }
}

fn scale_simd<F: Float>(v: &[F::Element], factor: f32, w: &mut [F::Element]) -> usize {
    let factor = f32x4_splat(factor);
    let (v, _) = v.as_chunks::<16>();
    for (w, v) in w.as_chunks_mut::<16>().0.iter_mut().zip(v) {
        let (v, w) = (v.as_chunks::<8>().0, w.as_chunks_mut::<8>().0);
        let scaled = |[a, b]: [v128; 2]| [f32x4_mul(a, factor), f32x4_mul(b, factor)];
        F::store8_canonical(&mut w[0], scaled(F::load8(&v[0])));
        F::store8_canonical(&mut w[1], scaled(F::load8(&v[1])));
    }
    v.len() * 16
}

#[cfg(test)]
mod tests {
    use super::super::testdata::{self, assert_same_bits, encoded};
    use super::super::{BF16, F16, F32};
    use super::*;

    const ROWS: usize = 11;
    const ROW: usize = 37;

    #[test]
    fn rows_are_folded_as_the_reference_does() {
        let mut reference = testdata::weight_norm();
        let (g, v) = (reference.take::<f32>(ROWS), reference.take::<f32>(ROWS * ROW));
        let expected = reference.all::<f32>();
        let mut sums = vec![0.0; ROWS];
        sums_of_squares::<F32>(&v, &mut sums);
        let mut w = vec![0.0; v.len()];
        for row in 0..ROWS {
            let range = row * ROW..(row + 1) * ROW;
            scale::<F32>(&v[range.clone()], factor(g[row], sums[row]), &mut w[range]);
        }
        assert_same_bits(&w, &expected, "reference");
    }

    #[test]
    fn eight_rows_at_a_time_are_the_same_sums() {
        fn check<F: Float>() {
            let v = encoded::<F>(&(0..ROWS * ROW).map(|i| (i as f32 - 200.0) * 0.37).collect::<Vec<_>>());
            let mut expected = vec![0.0; ROWS];
            sums_scalar::<F>(&v, ROW, &mut expected);
            for eights in [sums_simd::<F>, sums_scalar_eights::<F>] {
                let mut sums = vec![0.0; ROWS];
                assert_eq!(eights(&v, ROW, &mut sums), 8);
                assert_same_bits(&sums[..8], &expected[..8], "eight rows");
            }
            let (mut scalar, mut simd) = (vec![F::Element::default(); v.len()], vec![F::Element::default(); v.len()]);
            scale_scalar::<F>(&v, 0.123, &mut scalar);
            let done = scale_simd::<F>(&v, 0.123, &mut simd);
            assert_same_bits(&simd[..done], &scalar[..done], "scale");
        }
        check::<F32>();
        check::<F16>();
        check::<BF16>();
        sums_of_squares::<F32>(&[], &mut []);
        let mut empty_rows = [1.0; 9];
        sums_of_squares::<F32>(&[], &mut empty_rows);
        assert_eq!(empty_rows, [0.0; 9]);
    }

    #[test]
    fn the_square_root_is_the_nearest() {
        for x in testdata::f32().all::<f32>() {
            assert_same_bits(&[sqrt(x)], &[canonical(x.sqrt())], "sqrt");
        }
    }
}
