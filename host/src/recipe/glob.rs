//! Globs over tensor names: `*` stands for any characters, dots included, and
//! for none; every other character stands for itself.

/// A glob.
#[derive(Clone, Debug)]
pub(super) struct Glob(String);

impl Glob {
    pub(super) fn new(text: &str) -> Self {
        Glob(text.to_owned())
    }

    /// Whether the whole name fits. Takes at most name × glob steps.
    pub(super) fn matches(&self, name: &str) -> bool {
        let (glob, name) = (self.0.as_bytes(), name.as_bytes());
        let (mut g, mut n) = (0, 0);
        // The last `*` seen, and how far its text reaches.
        let mut star: Option<(usize, usize)> = None;
        while n < name.len() {
            if glob.get(g) == Some(&b'*') {
                star = Some((g, n));
                g += 1;
            } else if glob.get(g) == Some(&name[n]) {
                g += 1;
                n += 1;
            } else if let Some((at, reach)) = star {
                star = Some((at, reach + 1));
                g = at + 1;
                n = reach + 1;
            } else {
                return false;
            }
        }
        glob[g..].iter().all(|c| *c == b'*')
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_star_is_special_and_it_crosses_dots() {
        let cases = [
            ("*norm*", "h.0.norm.weight", true),
            ("*norm*", "norm", true),
            ("*.rope.inv_freq", "a.b.rope.inv_freq", true),
            ("*.rope.inv_freq", "rope.inv_freq", false),
            ("norm", "norm.weight", false),
            ("norm", "norm", true),
            ("h.?.w", "h.1.w", false),
            ("h.?.w", "h.?.w", true),
            ("[ab]", "a", false),
            ("a*b*c", "a.xb.b.yc", true),
            ("a*b*c", "a.xc", false),
            ("", "", true),
            ("", "a", false),
            ("*", "", true),
            ("**", "é", true),
            ("*é", "xé", true),
        ];
        for (glob, name, want) in cases {
            assert_eq!(Glob::new(glob).matches(name), want, "{glob} on {name}");
        }
    }

    #[test]
    fn many_stars_stay_quick() {
        let glob = Glob::new(&"*a".repeat(2000));
        assert!(!glob.matches(&format!("{}b", "a".repeat(4000))));
    }
}
