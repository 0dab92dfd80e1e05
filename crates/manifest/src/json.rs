//! JSON documents, with the text of numbers kept.

use crate::node::{Node, unique};

/// Deepest nesting; well below what the call stack takes.
const MAX_DEPTH: usize = 128;

/// Reads one JSON value that fills the whole text.
pub(crate) fn parse(text: &str) -> Result<Node, String> {
    let mut p = Parser { text, at: 0 };
    let node = p.value(0)?;
    p.space();
    match p.peek() {
        None => Ok(node),
        Some(c) => Err(format!("invalid character {c:?} after top-level value")),
    }
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
}

impl Parser<'_> {
    fn rest(&self) -> &str {
        &self.text[self.at..]
    }

    fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    fn space(&mut self) {
        self.at = self.text.len() - self.rest().trim_start_matches([' ', '\t', '\r', '\n']).len();
    }

    fn eat(&mut self, c: char) -> bool {
        let found = self.peek() == Some(c);
        if found {
            self.at += c.len_utf8();
        }
        found
    }

    fn unexpected<T>(&self, looking_for: &str) -> Result<T, String> {
        match self.peek() {
            None => Err("unexpected end of JSON input".into()),
            Some(c) => Err(format!("invalid character {c:?} looking for {looking_for}")),
        }
    }

    fn value(&mut self, depth: usize) -> Result<Node, String> {
        if depth > MAX_DEPTH {
            return Err("exceeded max depth".into());
        }
        self.space();
        match self.peek() {
            Some('{') => self.object(depth),
            Some('[') => self.array(depth),
            Some('"') => Ok(Node::String(self.string()?)),
            Some('-' | '0'..='9') => self.number(),
            _ => {
                for (word, node) in [("null", Node::Null), ("true", Node::Bool(true)), ("false", Node::Bool(false))] {
                    if self.rest().starts_with(word) {
                        self.at += word.len();
                        return Ok(node);
                    }
                }
                self.unexpected("beginning of value")
            }
        }
    }

    fn object(&mut self, depth: usize) -> Result<Node, String> {
        self.at += 1;
        let mut entries = Vec::new();
        self.space();
        if self.eat('}') {
            return Ok(Node::Object(entries));
        }
        loop {
            self.space();
            if self.peek() != Some('"') {
                return self.unexpected("beginning of object key string");
            }
            let key = self.string()?;
            self.space();
            if !self.eat(':') {
                return self.unexpected("':' after object key");
            }
            entries.push((key, self.value(depth + 1)?));
            self.space();
            if self.eat('}') {
                return Ok(Node::Object(unique(entries)));
            }
            if !self.eat(',') {
                return self.unexpected("',' or '}' after object key:value pair");
            }
        }
    }

    fn array(&mut self, depth: usize) -> Result<Node, String> {
        self.at += 1;
        let mut items = Vec::new();
        self.space();
        if self.eat(']') {
            return Ok(Node::Array(items));
        }
        loop {
            items.push(self.value(depth + 1)?);
            self.space();
            if self.eat(']') {
                return Ok(Node::Array(items));
            }
            if !self.eat(',') {
                return self.unexpected("',' or ']' after array element");
            }
        }
    }

    fn string(&mut self) -> Result<String, String> {
        let start = self.at;
        let mut escaped = false;
        for (i, c) in self.rest().char_indices().skip(1) {
            match c {
                _ if escaped => escaped = false,
                '\\' => escaped = true,
                '"' => {
                    self.at = start + i + 1;
                    return serde_json::from_str(&self.text[start..self.at])
                        .map_err(|e| format!("invalid string literal: {e}"));
                }
                _ => {}
            }
        }
        self.at = self.text.len();
        self.unexpected("end of string")
    }

    fn number(&mut self) -> Result<Node, String> {
        let digits = |s: &str| s.bytes().take_while(u8::is_ascii_digit).count();
        let s = self.rest();
        let mut len = usize::from(s.starts_with('-'));
        let whole = digits(&s[len..]);
        if whole == 0 || (whole > 1 && s[len..].starts_with('0')) {
            return Err("invalid character in numeric literal".into());
        }
        len += whole;
        if s[len..].starts_with('.') {
            let fraction = digits(&s[len + 1..]);
            if fraction == 0 {
                return Err("invalid character after decimal point in numeric literal".into());
            }
            len += 1 + fraction;
        }
        if s[len..].starts_with(['e', 'E']) {
            let sign = usize::from(s[len + 1..].starts_with(['+', '-']));
            let exponent = digits(&s[len + 1 + sign..]);
            if exponent == 0 {
                return Err("invalid character in exponent of numeric literal".into());
            }
            len += 1 + sign + exponent;
        }
        let number = s[..len].to_string();
        self.at += len;
        Ok(Node::Number(number))
    }
}
