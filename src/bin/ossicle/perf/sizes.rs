//! Message sizes: `8`, `4K`, `1.5M`, `1G` as nccl-tests reads them, and the sweep from the smallest to the largest.

/// More rows than anyone reads; a mistyped step must not run for days.
const SIZES_MAX: u64 = 100_000;
/// 1 TiB: beyond every GPU's memory, and far from overflow in the arithmetic on sizes.
const BYTES_MAX: u64 = 1 << 40;

/// A size in bytes with an optional binary suffix K, M or G.
pub(crate) fn parse(text: &str) -> Result<u64, String> {
    let trimmed = text.trim();
    let (digits, unit) = match trimmed.char_indices().next_back() {
        Some((at, 'k' | 'K')) => (&trimmed[..at], 1u64 << 10),
        Some((at, 'm' | 'M')) => (&trimmed[..at], 1 << 20),
        Some((at, 'g' | 'G')) => (&trimmed[..at], 1 << 30),
        _ => (trimmed, 1),
    };
    let plain = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    let number: f64 = digits.parse().ok().filter(|_| plain).ok_or_else(|| {
        format!("\"{text}\" is not a size; write bytes as a number with an optional K, M or G, such as 8, 4K or 1.5G")
    })?;
    let bytes = number * unit as f64;
    if bytes.fract() != 0.0 {
        return Err(format!("\"{text}\" is not a whole number of bytes"));
    }
    if bytes > BYTES_MAX as f64 {
        return Err(format!(
            "\"{text}\" is more than {}G, the largest size that is accepted",
            BYTES_MAX >> 30
        ));
    }
    Ok(bytes as u64)
}

/// Every size from `min_bytes` to `max_bytes`: multiplied by `factor` where that is above 1, else `step_bytes` apart.
pub(crate) fn sweep(min_bytes: u64, max_bytes: u64, factor: u64, step_bytes: u64) -> Result<Vec<u64>, String> {
    if min_bytes > max_bytes {
        return Err(format!(
            "the smallest size (-b {min_bytes}) is above the largest (-e {max_bytes})"
        ));
    }
    if factor > 1 && min_bytes == 0 && max_bytes > 0 {
        return Err("-b 0 cannot be multiplied by -f; start at -b 1 or step with -i".to_owned());
    }
    if factor <= 1 && step_bytes == 0 && min_bytes < max_bytes {
        return Err("the sizes never grow: -i is 0 and -f is 1; give -f 2, or -i with a step".to_owned());
    }
    let next = |size: &u64| {
        let grown = if factor > 1 {
            size.saturating_mul(factor)
        } else {
            size.saturating_add(step_bytes)
        };
        Some(grown).filter(|grown| *grown <= max_bytes && grown > size)
    };
    let sizes: Vec<u64> = std::iter::successors(Some(min_bytes), next)
        .take(SIZES_MAX as usize + 1)
        .collect();
    if sizes.len() as u64 > SIZES_MAX {
        return Err(format!(
            "more than {SIZES_MAX} sizes between -b {min_bytes} and -e {max_bytes}; take a larger -i"
        ));
    }
    Ok(sizes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_binary_and_bounded() {
        let good = [
            ("8", 8),
            ("0", 0),
            ("4K", 4096),
            ("4k", 4096),
            ("128M", 128 << 20),
            ("1g", 1 << 30),
            ("1.5K", 1536),
        ];
        for (text, bytes) in good {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
        for text in [
            "", "K", "-8", "4T", "4KB", "0.3", "nan", "inf", "1e3", "2000G", "1..5", "٣K",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_sweep_ends_at_or_below_the_largest_size() {
        assert_eq!(sweep(4, 40, 2, 0), Ok(vec![4, 8, 16, 32]));
        assert_eq!(sweep(4, 10, 1, 3), Ok(vec![4, 7, 10]));
        assert_eq!(sweep(7, 7, 1, 0), Ok(vec![7]));
        assert_eq!(sweep(0, 2, 1, 1), Ok(vec![0, 1, 2]));
        assert_eq!(sweep(u64::MAX, u64::MAX, 2, 1), Ok(vec![u64::MAX]));
    }

    #[test]
    fn a_sweep_that_would_not_end_is_refused() {
        for (min, max, factor, step) in [(0, 8, 2, 1), (8, 16, 1, 0), (16, 8, 2, 0), (0, 1 << 40, 1, 8)] {
            assert!(sweep(min, max, factor, step).is_err(), "{min} {max} {factor} {step}");
        }
    }
}
