//! JSON as a module reads and writes it.
//!
//! A module is instantiated for every tile and compiled on every host, so its
//! size counts: this reader and writer are a twentieth of a general library.
//! A number is kept as its text, so that a module without float parameters
//! carries no float parser. The host's own reader is another, which the tests
//! hold this one against.

use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

/// Values nested deeper than this are refused.
const MAX_DEPTH: usize = 64;

/// A JSON value.
///
/// ```
/// use weightmill_guest::json::Value;
///
/// let value = Value::parse(br#"{"a":[1,2.5,"x"],"b":true}"#).unwrap();
/// let list = value.get("a").and_then(Value::as_array).unwrap();
/// assert_eq!(list[0].as_u64(), Some(1));
/// assert_eq!(list[1].as_f64(), Some(2.5));
/// assert_eq!(value.get("b").and_then(Value::as_bool), Some(true));
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Value {
    /// `null`
    #[default]
    Null,
    /// `true` or `false`
    Bool(bool),
    /// A number, as its text.
    Number(String),
    /// A string.
    String(String),
    /// A list.
    Array(Vec<Value>),
    /// Names and values, in the order of the text.
    Object(Vec<(String, Value)>),
}

/// A text that is no JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JsonError {
    /// Bytes from the beginning of the text.
    pub at: usize,
    /// What was expected.
    pub expected: &'static str,
}

impl fmt::Display for JsonError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "expected {} at byte {}", self.expected, self.at)
    }
}

impl core::error::Error for JsonError {}

impl Value {
    /// The value that `text` is.
    ///
    /// # Errors
    /// If it is no JSON, or nested deeper than 64 values.
    ///
    /// ```
    /// use weightmill_guest::json::Value;
    ///
    /// assert_eq!(Value::parse(b"[1,").unwrap_err().to_string(), "expected a value at byte 3");
    /// ```
    pub fn parse(text: &[u8]) -> Result<Value, JsonError> {
        let text = core::str::from_utf8(text).map_err(|e| JsonError { at: e.valid_up_to(), expected: "UTF-8" })?;
        let mut reader = Reader { text: text.as_bytes(), at: 0 };
        let value = reader.value(0)?;
        reader.skip_space();
        if reader.at < text.len() { Err(reader.expected("the end")) } else { Ok(value) }
    }

    /// The value named `name`, of an object that has it.
    ///
    /// ```
    /// use weightmill_guest::json::Value;
    ///
    /// let value = Value::parse(br#"{"n":-3,"s":"x"}"#).unwrap();
    /// assert_eq!(value.get("n").and_then(Value::as_i64), Some(-3));
    /// assert_eq!(value.get("n").and_then(Value::as_u64), None);
    /// assert_eq!(value.get("s").and_then(Value::as_str), Some("x"));
    /// assert_eq!(value.as_object().map(|members| members.len()), Some(2));
    /// ```
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.as_object()?.iter().find(|(key, _)| key == name).map(|(_, value)| value)
    }

    /// A boolean.
    pub fn as_bool(&self) -> Option<bool> {
        if let Value::Bool(b) = self { Some(*b) } else { None }
    }

    /// A whole number of at least 0, written as one.
    pub fn as_u64(&self) -> Option<u64> {
        if let Value::Number(n) = self { n.parse().ok() } else { None }
    }

    /// A whole number, written as one.
    pub fn as_i64(&self) -> Option<i64> {
        if let Value::Number(n) = self { n.parse().ok() } else { None }
    }

    /// A number, rounded to the nearest float.
    pub fn as_f64(&self) -> Option<f64> {
        if let Value::Number(n) = self { n.parse().ok() } else { None }
    }

    /// A string.
    pub fn as_str(&self) -> Option<&str> {
        if let Value::String(s) = self { Some(s) } else { None }
    }

    /// A list.
    pub fn as_array(&self) -> Option<&[Value]> {
        if let Value::Array(items) = self { Some(items) } else { None }
    }

    /// An object.
    pub fn as_object(&self) -> Option<&[(String, Value)]> {
        if let Value::Object(members) = self { Some(members) } else { None }
    }
}

struct Reader<'t> {
    text: &'t [u8],
    at: usize,
}

impl Reader<'_> {
    fn expected(&self, expected: &'static str) -> JsonError {
        JsonError { at: self.at, expected }
    }

    fn peek(&self) -> u8 {
        self.text.get(self.at).copied().unwrap_or(0)
    }

    fn skip_space(&mut self) {
        while matches!(self.peek(), b' ' | b'\n' | b'\r' | b'\t') {
            self.at += 1;
        }
    }

    fn take(&mut self, byte: u8) -> bool {
        self.skip_space();
        let there = self.peek() == byte && self.at < self.text.len();
        self.at += usize::from(there);
        there
    }

    fn value(&mut self, depth: usize) -> Result<Value, JsonError> {
        if depth > MAX_DEPTH {
            return Err(self.expected("fewer nested values"));
        }
        self.skip_space();
        match self.peek() {
            b'n' => self.word("null", Value::Null),
            b't' => self.word("true", Value::Bool(true)),
            b'f' => self.word("false", Value::Bool(false)),
            b'"' => self.string().map(Value::String),
            b'-' | b'0'..=b'9' => self.number(),
            b'[' => self.list(b']', |reader| reader.value(depth + 1)).map(Value::Array),
            b'{' => self
                .list(b'}', |reader| {
                    reader.skip_space();
                    let name = reader.string()?;
                    if !reader.take(b':') {
                        return Err(reader.expected("a colon"));
                    }
                    Ok((name, reader.value(depth + 1)?))
                })
                .map(Value::Object),
            _ => Err(self.expected("a value")),
        }
    }

    fn word(&mut self, word: &str, value: Value) -> Result<Value, JsonError> {
        if !self.text[self.at..].starts_with(word.as_bytes()) {
            return Err(self.expected("a value"));
        }
        self.at += word.len();
        Ok(value)
    }

    fn list<T>(
        &mut self,
        close: u8,
        mut item: impl FnMut(&mut Self) -> Result<T, JsonError>,
    ) -> Result<Vec<T>, JsonError> {
        self.at += 1;
        let mut items = Vec::new();
        if self.take(close) {
            return Ok(items);
        }
        loop {
            items.push(item(self)?);
            if self.take(close) {
                return Ok(items);
            }
            if !self.take(b',') {
                return Err(self.expected("a comma or the end of the list"));
            }
        }
    }

    fn digits(&mut self) -> Result<(), JsonError> {
        let start = self.at;
        while self.peek().is_ascii_digit() {
            self.at += 1;
        }
        if self.at == start { Err(self.expected("a digit")) } else { Ok(()) }
    }

    fn number(&mut self) -> Result<Value, JsonError> {
        let start = self.at;
        self.at += usize::from(self.peek() == b'-');
        let leading = self.at;
        self.digits()?;
        if self.text[leading] == b'0' && self.at > leading + 1 {
            self.at = leading + 1;
            return Err(self.expected("no digit after a leading 0"));
        }
        if self.peek() == b'.' {
            self.at += 1;
            self.digits()?;
        }
        if matches!(self.peek(), b'e' | b'E') {
            self.at += 1;
            self.at += usize::from(matches!(self.peek(), b'+' | b'-'));
            self.digits()?;
        }
        Ok(Value::Number(self.text[start..self.at].iter().map(|&b| char::from(b)).collect()))
    }

    fn string(&mut self) -> Result<String, JsonError> {
        if self.peek() != b'"' {
            return Err(self.expected("a string"));
        }
        self.at += 1;
        let mut bytes = Vec::new();
        loop {
            match self.peek() {
                b'"' => break,
                b'\\' => {
                    self.at += 1;
                    let c = self.escape()?;
                    bytes.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes());
                }
                0..=0x1f => return Err(self.expected("the end of a string")),
                byte => {
                    bytes.push(byte);
                    self.at += 1;
                }
            }
        }
        self.at += 1;
        // The text is UTF-8, and only whole ASCII characters were replaced.
        String::from_utf8(bytes).map_err(|_| self.expected("UTF-8"))
    }

    fn escape(&mut self) -> Result<char, JsonError> {
        let c = match self.peek() {
            b'u' => return self.unicode_escape(),
            b'b' => '\u{8}',
            b'f' => '\u{c}',
            b'n' => '\n',
            b'r' => '\r',
            b't' => '\t',
            c @ (b'"' | b'\\' | b'/') => char::from(c),
            _ => return Err(self.expected("an escape")),
        };
        self.at += 1;
        Ok(c)
    }

    fn unicode_escape(&mut self) -> Result<char, JsonError> {
        let high = self.hex4()?;
        let code = match high {
            0xD800..=0xDBFF if self.text[self.at..].starts_with(b"\\u") => {
                self.at += 1;
                match self.hex4()? {
                    low @ 0xDC00..=0xDFFF => 0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00),
                    _ => return Err(self.expected("the second half of a surrogate pair")),
                }
            }
            code => code,
        };
        char::from_u32(code).ok_or_else(|| self.expected("a surrogate pair"))
    }

    /// Four digits after the `u` that is next.
    fn hex4(&mut self) -> Result<u32, JsonError> {
        self.at += 1;
        let mut code = 0;
        for _ in 0..4 {
            let digit = char::from(self.peek()).to_digit(16).ok_or_else(|| self.expected("a hexadecimal digit"))?;
            code = code << 4 | digit;
            self.at += 1;
        }
        Ok(code)
    }
}

/// Writes JSON without spaces.
#[derive(Debug, Default)]
pub(crate) struct Writer {
    bytes: Vec<u8>,
}

impl Writer {
    pub(crate) fn finish(self) -> Vec<u8> {
        self.bytes
    }

    /// Text that is JSON already.
    pub(crate) fn raw(&mut self, text: &str) -> &mut Self {
        self.bytes.extend_from_slice(text.as_bytes());
        self
    }

    pub(crate) fn whole(&mut self, n: u64) -> &mut Self {
        let mut digits = [0; 20];
        let (mut at, mut n) = (digits.len(), n);
        loop {
            at -= 1;
            digits[at] = b'0' + (n % 10) as u8;
            n /= 10;
            if n == 0 {
                break;
            }
        }
        self.bytes.extend_from_slice(&digits[at..]);
        self
    }

    pub(crate) fn signed(&mut self, n: i64) -> &mut Self {
        if n < 0 {
            self.raw("-");
        }
        self.whole(n.unsigned_abs())
    }

    pub(crate) fn text(&mut self, text: &str) -> &mut Self {
        self.raw("\"");
        for c in text.chars() {
            match c {
                '"' | '\\' => self.bytes.extend_from_slice(&[b'\\', c as u8]),
                '\u{0}'..='\u{1f}' => {
                    let hex = |n: u32| b"0123456789abcdef"[n as usize & 15];
                    self.raw("\\u00").bytes.extend_from_slice(&[hex(c as u32 >> 4), hex(c as u32)]);
                }
                c => self.bytes.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
            }
        }
        self.raw("\"")
    }

    /// A list of what `each` writes.
    pub(crate) fn list<T>(&mut self, items: &[T], mut each: impl FnMut(&mut Self, &T)) -> &mut Self {
        self.raw("[");
        for (k, item) in items.iter().enumerate() {
            if k > 0 {
                self.raw(",");
            }
            each(self, item);
        }
        self.raw("]")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the host's reader makes of a text, in our terms.
    fn theirs(value: serde_json::Value) -> Value {
        match value {
            serde_json::Value::Null => Value::Null,
            serde_json::Value::Bool(b) => Value::Bool(b),
            serde_json::Value::Number(n) => Value::Number(n.to_string()),
            serde_json::Value::String(s) => Value::String(s),
            serde_json::Value::Array(items) => Value::Array(items.into_iter().map(theirs).collect()),
            serde_json::Value::Object(members) => {
                Value::Object(members.into_iter().map(|(name, value)| (name, theirs(value))).collect())
            }
        }
    }

    #[test]
    fn both_readers_take_and_refuse_the_same() {
        for text in [
            "null",
            " true ",
            "false",
            "0",
            "-7",
            "18446744073709551615",
            "\"\"",
            "\"a\\n\\u00e9\\ud83d\\ude00é\"",
            "[]",
            "[1, [2], {}]",
            "{\"a\":1,\"b\":{\"c\":[null]}}",
            "\"\\/\\\\\\\"\\b\\f\\r\\t\"",
            // Refused:
            "",
            "nul",
            "01",
            "-",
            "1.",
            "1e",
            ".5",
            "+1",
            "\"",
            "\"\\x\"",
            "\"\\ud800\"",
            "\"\\ud800\\u0041\"",
            "\"\t\"",
            "[1,]",
            "[1 2]",
            "{\"a\"}",
            "{a:1}",
            "{\"a\":1,}",
            "1 2",
            "\"\\u12\"",
            "\u{0}",
            "[\u{0}",
        ] {
            let want = serde_json::from_str::<serde_json::Value>(text).ok().map(theirs);
            assert_eq!(Value::parse(text.as_bytes()).ok(), want, "{text}");
        }
        assert!(Value::parse(b"\"\xff\"").is_err());
        assert!(Value::parse("[".repeat(100_000).as_bytes()).is_err());
    }

    #[test]
    fn floats_are_the_nearest() {
        for text in ["0.1", "-1e-7", "1e+21", "5e-324", "123456789012345680000", "3"] {
            assert_eq!(Value::parse(text.as_bytes()).unwrap().as_f64(), text.parse().ok(), "{text}");
        }
        assert_eq!(Value::parse(b"1.0").unwrap().as_u64(), None);
        assert_eq!(Value::parse(b"-3").unwrap().as_i64(), Some(-3));
    }

    #[test]
    fn what_is_written_can_be_read() {
        let text = "a\"\\\u{0}\u{1f}\n é😀";
        let mut writer = Writer::default();
        writer.raw("[").text(text).raw(",").whole(u64::MAX).raw(",").signed(i64::MIN).raw("]");
        let back: (String, u64, i64) = serde_json::from_slice(&writer.finish()).unwrap();
        assert_eq!(back, (text.into(), u64::MAX, i64::MIN));
    }
}
