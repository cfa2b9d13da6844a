//! How much memory there is to use.

use std::fs;

/// Half of what the cgroup or the machine has free, in bytes: the default for
/// `--memory-budget`. 1 GiB where neither can be read.
pub fn default_budget_bytes() -> u64 {
    free_bytes().map_or(1 << 30, |free| free / 2)
}

fn free_bytes() -> Option<u64> {
    let machine = meminfo("MemAvailable:");
    let cgroup = cgroup_free();
    match (machine, cgroup) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

fn meminfo(field: &str) -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|l| l.starts_with(field))?;
    Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? * 1024)
}

/// What this process's cgroup (version 2) may still take, or the tightest of
/// its parents'.
fn cgroup_free() -> Option<u64> {
    let own = fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = own.lines().find_map(|l| l.strip_prefix("0::"))?;
    let number = |file: std::path::PathBuf| fs::read_to_string(file).ok()?.trim().parse::<u64>().ok();
    let root = std::path::Path::new("/sys/fs/cgroup");
    let mut folder = root.join(path.trim_start_matches('/'));
    let mut least = None;
    loop {
        if let Some(max) = number(folder.join("memory.max")) {
            let used = number(folder.join("memory.current")).unwrap_or(0);
            let free = max.saturating_sub(used);
            least = Some(least.map_or(free, |l: u64| l.min(free)));
        }
        if folder == root || !folder.pop() || !folder.starts_with(root) {
            return least;
        }
    }
}
