//! One tile, as `run` sees it.

use alloc::vec::Vec;

use crate::abi::RunBlock;
use crate::pod::{self, Pod};

/// A piece of an output that `run` computes: input windows to read, an output
/// window to fill.
///
/// Input windows live as long as the tile, apart from the output window, so
/// both can be held at once:
///
/// ```
/// use weightmill_guest::prelude::*;
///
/// fn double(tile: &mut Tile) {
///     let from = tile.input::<f32>(0);
///     for (to, x) in tile.output::<f32>().iter_mut().zip(from) {
///         *to = x * 2.0;
///     }
/// }
///
/// let mut out = weightmill_guest::native::Window::zeroed(8);
/// let input = weightmill_guest::native::Window::of(&[1.5_f32, -2.0]);
/// double(&mut Tile::new(Default::default(), vec![input.bytes()], &[], out.bytes_mut()));
/// assert_eq!(out.numbers::<f32>(), [3.0, -4.0]);
/// ```
#[derive(Debug)]
pub struct Tile<'a> {
    block: RunBlock,
    inputs: Vec<&'a [u8]>,
    args: &'a [i64],
    output: &'a mut [u8],
}

impl<'a> Tile<'a> {
    /// A tile over windows that begin on 64-byte boundaries. Of `block` only
    /// `target`, `group`, `turn`, `tile` and `offset` are used.
    ///
    /// The SDK makes tiles; this is for tests of a kernel on its own.
    pub fn new(block: RunBlock, inputs: Vec<&'a [u8]>, args: &'a [i64], output: &'a mut [u8]) -> Self {
        Tile { block, inputs, args, output }
    }

    /// Which tensor this is a tile of: 0, 1, … the outputs in the order in
    /// which `plan` gave them, then the scratch tensors.
    pub fn target(&self) -> usize {
        self.block.target as usize
    }

    /// The position of the tile's group among the target's groups.
    pub fn group(&self) -> usize {
        self.block.group as usize
    }

    /// The tile's position in its group.
    pub fn turn(&self) -> u64 {
        u64::from(self.block.turn)
    }

    /// The tile's position in the target, over all groups.
    pub fn position(&self) -> u64 {
        u64::from(self.block.tile)
    }

    /// The tile's first byte in the target.
    ///
    /// ```
    /// # use weightmill_guest::abi::RunBlock;
    /// # use weightmill_guest::native::Window;
    /// # use weightmill_guest::prelude::*;
    /// # let window = Window::of(&[1_u16, 2]);
    /// # let mut out = Window::zeroed(4);
    /// # let block = RunBlock { target: 1, group: 0, turn: 2, tile: 5, offset: 80, ..RunBlock::default() };
    /// # let mut tile = Tile::new(block, vec![window.bytes()], &[7], out.bytes_mut());
    /// // Tile 2 of group 0 of the second tensor.
    /// assert_eq!((tile.target(), tile.group(), tile.turn(), tile.position()), (1, 0, 2, 5));
    /// assert_eq!((tile.offset(), tile.args()), (80, &[7][..]));
    /// ```
    pub fn offset(&self) -> u64 {
        self.block.offset
    }

    /// The integers that the plan gave to the tile's group.
    pub fn args(&self) -> &'a [i64] {
        self.args
    }

    /// How many input windows there are.
    pub fn inputs(&self) -> usize {
        self.inputs.len()
    }

    /// The bytes of input window `window`.
    ///
    /// # Panics
    /// If the plan gave the group fewer windows.
    #[track_caller]
    pub fn bytes(&self, window: usize) -> &'a [u8] {
        assert!(window < self.inputs.len(), "the tile has {} input windows, not {}", self.inputs.len(), window + 1);
        self.inputs[window]
    }

    /// Input window `window` as numbers.
    ///
    /// # Panics
    /// If the plan gave the group fewer windows, or the window is not a whole
    /// number of `T`.
    ///
    /// ```
    /// # use weightmill_guest::abi::RunBlock;
    /// # use weightmill_guest::native::Window;
    /// # use weightmill_guest::prelude::*;
    /// # let window = Window::of(&[1_u16, 2]);
    /// # let mut out = Window::zeroed(4);
    /// # let block = RunBlock { target: 1, group: 0, turn: 2, tile: 5, offset: 80, ..RunBlock::default() };
    /// # let mut tile = Tile::new(block, vec![window.bytes()], &[7], out.bytes_mut());
    /// assert_eq!((tile.inputs(), tile.input::<u16>(0)), (1, &[1, 2][..]));
    /// assert_eq!(tile.bytes(0), [1, 0, 2, 0]);
    /// ```
    #[track_caller]
    pub fn input<T: Pod>(&self, window: usize) -> &'a [T] {
        pod::of(self.bytes(window))
    }

    /// The output window, zero where nothing is written yet, as numbers.
    ///
    /// # Panics
    /// If the window is not a whole number of `T`.
    ///
    /// ```
    /// # use weightmill_guest::abi::RunBlock;
    /// # use weightmill_guest::native::Window;
    /// # use weightmill_guest::prelude::*;
    /// # let window = Window::of(&[1_u16, 2]);
    /// # let mut out = Window::zeroed(4);
    /// # let block = RunBlock { target: 1, group: 0, turn: 2, tile: 5, offset: 80, ..RunBlock::default() };
    /// # let mut tile = Tile::new(block, vec![window.bytes()], &[7], out.bytes_mut());
    /// tile.output::<u16>()[1] = 0x0102;
    /// assert_eq!(tile.output_bytes(), [0, 0, 2, 1]);
    /// ```
    #[track_caller]
    pub fn output<T: Pod>(&mut self) -> &mut [T] {
        pod::of_mut(self.output)
    }

    /// The bytes of the output window.
    pub fn output_bytes(&mut self) -> &mut [u8] {
        self.output
    }
}
