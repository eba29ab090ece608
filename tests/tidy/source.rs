//! A Rust source, taken apart far enough for the tidy test: code without comments and texts, the texts, the functions.

use std::fs;
use std::path::Path;

pub struct Source {
    /// Relative to the repository, with slashes.
    pub path: String,
    pub text: String,
    /// The text with comments and the insides of literals blanked out; every line keeps its number.
    pub code: String,
    /// The comments alone, likewise.
    comments: String,
    /// String literals: their place in `code` (of the opening quote) and what they hold.
    pub literals: Vec<(usize, String)>,
}

pub struct Function<'a> {
    pub name: &'a str,
    /// From 1.
    pub line: usize,
    pub lines: usize,
}

impl Source {
    pub fn read(root: &Path, path: &Path) -> Source {
        let text = fs::read_to_string(path).expect("a readable source");
        let path = path.strip_prefix(root).expect("a path in the repository");
        Source::new(path.to_string_lossy().replace('\\', "/"), text)
    }

    pub fn new(path: String, text: String) -> Source {
        let mut parts = Parts::default();
        let bytes: Vec<char> = text.chars().collect();
        let mut at = 0;
        while at < bytes.len() {
            at = parts.take(&bytes, at);
        }
        Source {
            path,
            text,
            code: parts.code,
            comments: parts.comments,
            literals: parts.literals,
        }
    }

    /// The code up to the unit tests; nothing of a file that is one.
    pub fn production(&self) -> &str {
        let test = self.path.contains("tests/") || self.path.ends_with("tests.rs");
        let end = self.code.find("#[cfg(test)]").unwrap_or(self.code.len());
        &self.code[..if test { 0 } else { end }]
    }

    /// Literals up to the unit tests, each with the code in front of it.
    pub fn production_literals(&self) -> impl Iterator<Item = (&str, String)> {
        let production = self.production();
        let literals = self.literals.iter().filter(|(at, _)| *at < production.len());
        literals.map(move |(at, text)| (&production[..*at], text.clone()))
    }

    pub fn has_comment_word(&self, word: &str) -> bool {
        self.comments
            .split(|c: char| !c.is_alphanumeric() && c != '_')
            .any(|found| found == word)
    }

    /// Functions that have a body.
    pub fn functions(&self) -> Vec<Function<'_>> {
        let mut found = Vec::new();
        for (at, _) in self.code.match_indices("fn ") {
            let before = self.code[..at].chars().next_back();
            let rest = &self.code[at + 3..];
            let name = rest
                .split(|c: char| !c.is_alphanumeric() && c != '_')
                .next()
                .unwrap_or_default();
            if name.is_empty() || before.is_some_and(|c| c.is_alphanumeric() || c == '_') {
                continue;
            }
            let Some(open) = rest.find(['{', ';']).filter(|open| rest[*open..].starts_with('{')) else {
                continue;
            };
            let mut depth = 0;
            let closed = rest[open..].char_indices().find(|(_, c)| {
                depth += i32::from(*c == '{') - i32::from(*c == '}');
                depth == 0
            });
            let end = closed.map_or(rest.len(), |(end, _)| open + end);
            let line = self.code[..at].matches('\n').count() + 1;
            found.push(Function {
                name,
                line,
                lines: rest[..end].matches('\n').count() + 1,
            });
        }
        found
    }
}

/// Whether the code calls the macro `name`, which includes the exclamation mark.
pub fn calls_macro(code: &str, name: &str) -> bool {
    let before = |at: usize| code[..at].chars().next_back();
    code.match_indices(name)
        .any(|(at, _)| !before(at).is_some_and(|c| c.is_alphanumeric() || c == '_'))
}

#[derive(Default)]
struct Parts {
    code: String,
    comments: String,
    literals: Vec<(usize, String)>,
}

impl Parts {
    /// Takes one piece of the text at `at` and returns where the next begins.
    fn take(&mut self, text: &[char], at: usize) -> usize {
        let next = |offset: usize| text.get(at + offset).copied().unwrap_or('\0');
        match text[at] {
            '/' if next(1) == '/' => {
                let end = (at..text.len()).find(|at| text[*at] == '\n').unwrap_or(text.len());
                self.blank(&text[at..end], true);
                end
            }
            '/' if next(1) == '*' => {
                let end = end_of_block_comment(text, at);
                self.blank(&text[at..end], true);
                end
            }
            'r' if !self.in_word() && (next(1) == '"' || next(1) == '#') => {
                let hashes = (at + 1..text.len()).take_while(|at| text[*at] == '#').count();
                let open = at + 1 + hashes;
                if text.get(open) != Some(&'"') {
                    self.code.push('r');
                    return at + 1;
                }
                let closes = |quote: usize| {
                    text[quote] == '"' && text[quote + 1..].iter().take(hashes).filter(|c| **c == '#').count() == hashes
                };
                let close = (open + 1..text.len())
                    .find(|quote| closes(*quote))
                    .unwrap_or(text.len() - 1);
                self.literal(&text[open + 1..close]);
                close + 1 + hashes
            }
            '"' => {
                let close = end_of_quoted(text, at, '"');
                self.literal(&text[at + 1..close]);
                close + 1
            }
            // A lifetime has no closing quote after its first character.
            '\'' if next(1) == '\\' || next(2) == '\'' => {
                let close = end_of_quoted(text, at, '\'');
                self.code.push_str("' '");
                close + 1
            }
            other => {
                self.code.push(other);
                at + 1
            }
        }
    }

    fn in_word(&self) -> bool {
        // b, c and br, cr prefixes belong to the literal that follows.
        let mut back = self.code.chars().rev();
        match back.next() {
            Some('b' | 'c') => back.next().is_some_and(|c| c.is_alphanumeric() || c == '_'),
            Some(c) => c.is_alphanumeric() || c == '_',
            None => false,
        }
    }

    fn literal(&mut self, inside: &[char]) {
        self.literals.push((self.code.len(), inside.iter().collect()));
        self.code.push('"');
        self.blank(inside, false);
        self.code.push('"');
    }

    fn blank(&mut self, piece: &[char], comment: bool) {
        for c in piece {
            self.code.push(if *c == '\n' { '\n' } else { ' ' });
            if comment {
                self.comments.push(*c);
            }
        }
        self.comments.push('\n');
    }
}

fn end_of_block_comment(text: &[char], start: usize) -> usize {
    let mut depth = 0;
    let mut at = start;
    while at + 1 < text.len() {
        match (text[at], text[at + 1]) {
            ('/', '*') => depth += 1,
            ('*', '/') => depth -= 1,
            _ => {
                at += 1;
                continue;
            }
        }
        at += 2;
        if depth == 0 {
            return at;
        }
    }
    text.len()
}

/// The place of the closing quote; a backslash hides the character after it.
fn end_of_quoted(text: &[char], open: usize, quote: char) -> usize {
    let mut at = open + 1;
    while at < text.len() && text[at] != quote {
        at += if text[at] == '\\' { 2 } else { 1 };
    }
    at.min(text.len() - 1)
}

#[test]
fn a_source_comes_apart_as_the_compiler_would_take_it() {
    let text = [
        "//! Header with \"quotes\" and unsafe { }.",
        "fn one<'a>(x: &'a str) -> char { '{' }",
        "/* fn hidden() { /* nested */ TODO */",
        "fn two() {",
        "    let s = r#\"fn not() { \"TODO\" }\"#;",
        "    let t = (\"}\", b\"\\\"\", '\\'', \"NCCL_X\");",
        "}",
        "fn declared();",
    ];
    let source = Source::new("src/x.rs".to_owned(), text.join("\n"));
    assert_eq!(source.code.lines().count(), text.len());
    assert!(!source.code.contains("unsafe") && !source.code.contains("TODO"));
    assert!(source.has_comment_word("TODO") && !source.has_comment_word("not"));
    let functions: Vec<_> = source
        .functions()
        .into_iter()
        .map(|f| (f.name.to_owned(), f.line, f.lines))
        .collect();
    assert_eq!(functions, [("one".to_owned(), 2, 1), ("two".to_owned(), 4, 4)]);
    let literals: Vec<&str> = source.literals.iter().map(|(_, text)| text.as_str()).collect();
    assert_eq!(literals, ["fn not() { \"TODO\" }", "}", "\\\"", "NCCL_X"]);
}
