//! What people and programs read.

use std::io::{IsTerminal, Write};

use crate::error::Error;

/// Prints one JSON document on standard output. A closed pipe is not an error.
pub(super) fn json(document: &serde_json::Value) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{document:#}");
}

/// Writes a document on standard output as it is. A closed pipe is not an
/// error.
pub(super) fn raw(document: &[u8]) {
    let _ = std::io::stdout().lock().write_all(document);
}

/// An error as the `error` member of a document.
pub(super) fn error_document(error: &Error) -> serde_json::Value {
    serde_json::json!({
        "code": error.code().as_str(),
        "message": error.message(),
        "hint": error.hint_text(),
        "at": error.location().map(|at| serde_json::json!({
            "file": at.file.to_string_lossy(), "line": at.line, "column": at.column,
        })),
    })
}

/// Prints a line on standard output. A closed pipe is not an error.
pub(super) fn line(text: impl std::fmt::Display) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{text}");
}

/// Colours, where the stream is a terminal and `NO_COLOR` is unset.
#[derive(Clone, Copy)]
pub(super) struct Style {
    colour: bool,
}

impl Style {
    pub(super) fn stdout() -> Self {
        Style { colour: std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none() }
    }

    pub(super) fn stderr() -> Self {
        Style { colour: std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none() }
    }

    fn paint(self, code: &str, text: &str) -> String {
        if self.colour { format!("\u{1b}[{code}m{text}\u{1b}[0m") } else { text.to_string() }
    }

    pub(super) fn bold(self, text: &str) -> String {
        self.paint("1", text)
    }

    pub(super) fn red(self, text: &str) -> String {
        self.paint("1;31", text)
    }

    pub(super) fn green(self, text: &str) -> String {
        self.paint("32", text)
    }

    pub(super) fn dim(self, text: &str) -> String {
        self.paint("2", text)
    }
}

/// A number of bytes, in decimal units.
pub(super) fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["B", "kB", "MB", "GB", "TB"];
    let mut value = n as f64;
    let mut unit = 0;
    while value >= 999.5 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    if unit == 0 || value >= 99.95 {
        format!("{value:.0} {}", UNITS[unit])
    } else {
        format!("{value:.1} {}", UNITS[unit])
    }
}

/// A duration, in the unit that reads best.
pub(super) fn duration(d: std::time::Duration) -> String {
    let s = d.as_secs_f64();
    if s < 0.0995 {
        format!("{:.0} ms", s * 1e3)
    } else if s < 100.0 {
        format!("{s:.1} s")
    } else {
        format!("{:.0} min {:02.0} s", (s / 60.0).floor(), s % 60.0)
    }
}

/// `1 shard`, `2 shards`.
pub(super) fn count(n: usize, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

/// A table with aligned columns; numbers (columns in `right`) to the right.
pub(super) fn table(header: &[&str], right: &[usize], rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.chain([header[column].chars().count()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let write = |cells: Vec<&str>| {
        let mut text = String::new();
        for (column, cell) in cells.iter().enumerate() {
            let pad = widths[column] - cell.chars().count();
            if right.contains(&column) {
                text.extend(std::iter::repeat_n(' ', pad));
                text.push_str(cell);
            } else {
                text.push_str(cell);
                text.extend(std::iter::repeat_n(' ', pad));
            }
            text.push_str("  ");
        }
        text.trim_end().to_string()
    };
    let style = Style::stdout();
    let mut lines = vec![style.dim(&write(header.to_vec()))];
    lines.extend(rows.iter().map(|row| write(row.iter().map(String::as_str).collect())));
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_well() {
        let shown: Vec<String> = [0, 999, 1000, 99_949, 324_000_000, 999_600_000, 4_294_967_296].map(bytes).to_vec();
        assert_eq!(shown, ["0 B", "999 B", "1.0 kB", "99.9 kB", "324 MB", "1.0 GB", "4.3 GB"]);
    }

    #[test]
    fn columns_line_up() {
        let rows = vec![vec!["a".into(), "10".into()], vec!["long".into(), "9".into()]];
        assert_eq!(table(&["name", "n"], &[1], &rows), "name   n\na     10\nlong   9");
    }
}
