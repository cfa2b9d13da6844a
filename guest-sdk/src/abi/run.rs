/// The run block, in the host's own integers. On the wire: little-endian, 64
/// bytes, laid out as the table in the [module documentation](super) says.
///
/// ```
/// use weightmill_guest::abi::RunBlock;
///
/// let block = RunBlock { turn: 3, out_len: 16, ..RunBlock::default() };
/// assert_eq!(RunBlock::decode(&block.encode()), Some(block));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunBlock {
    /// Which tensor: outputs in the answer's order, then scratch tensors.
    pub target: u32,
    /// Position of the tile's group.
    pub group: u32,
    /// Position of the tile in its group.
    pub turn: u32,
    /// First byte of the tile in the target.
    pub offset: u64,
    /// The zeroed output window.
    pub out_ptr: u32,
    /// Its bytes.
    pub out_len: u32,
    /// Array of `{ptr, len}`.
    pub inputs_ptr: u32,
    /// How many input windows.
    pub inputs_len: u32,
    /// Array of i64.
    pub args_ptr: u32,
    /// How many.
    pub args_len: u32,
    /// Canonical JSON of the parameters.
    pub params_ptr: u32,
    /// Its bytes.
    pub params_len: u32,
    /// Position of the tile in the target, counted over all groups.
    pub tile: u32,
}

impl RunBlock {
    /// Bytes on the wire.
    pub const BYTES: usize = 64;

    /// To the wire.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut wire = [0; Self::BYTES];
        let mut put = |at: usize, value: u32| wire[at..at + 4].copy_from_slice(&value.to_le_bytes());
        put(0, super::ABI_VERSION);
        put(4, self.target);
        put(8, self.group);
        put(12, self.turn);
        put(24, self.out_ptr);
        put(28, self.out_len);
        put(32, self.inputs_ptr);
        put(36, self.inputs_len);
        put(40, self.args_ptr);
        put(44, self.args_len);
        put(48, self.params_ptr);
        put(52, self.params_len);
        put(56, self.tile);
        wire[16..24].copy_from_slice(&self.offset.to_le_bytes());
        wire
    }

    /// From the wire; `None` if the ABI version is not 1.
    pub fn decode(wire: &[u8; Self::BYTES]) -> Option<Self> {
        let get = |at: usize| u32::from_le_bytes([wire[at], wire[at + 1], wire[at + 2], wire[at + 3]]);
        if get(0) != super::ABI_VERSION {
            return None;
        }
        Some(RunBlock {
            target: get(4),
            group: get(8),
            turn: get(12),
            offset: u64::from(get(16)) | u64::from(get(20)) << 32,
            out_ptr: get(24),
            out_len: get(28),
            inputs_ptr: get(32),
            inputs_len: get(36),
            args_ptr: get(40),
            args_len: get(44),
            params_ptr: get(48),
            params_len: get(52),
            tile: get(56),
        })
    }
}

/// Packs the address and length of a document as `wm_plan` and `wm_run` do.
pub const fn pack(ptr: u32, len: u32) -> i64 {
    ((ptr as u64) << 32 | len as u64) as i64
}

/// The address and length of a packed document.
///
/// ```
/// use weightmill_guest::abi::{pack, unpack};
///
/// assert_eq!(unpack(pack(0x1_0000, 12)), (0x1_0000, 12));
/// ```
pub const fn unpack(packed: i64) -> (u32, u32) {
    ((packed as u64 >> 32) as u32, packed as u64 as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_block_survives_the_wire() {
        let block = RunBlock { target: 1, turn: 3, offset: 1 << 40 | 7, out_len: 9, tile: 12, ..RunBlock::default() };
        assert_eq!(RunBlock::decode(&block.encode()), Some(block));
        let mut other = block.encode();
        other[0] = 2;
        assert_eq!(RunBlock::decode(&other), None);
    }

    #[test]
    fn packing_keeps_high_addresses() {
        assert_eq!(unpack(pack(0xFFFF_0000, 0x8000_0001)), (0xFFFF_0000, 0x8000_0001));
    }
}
