//! Shell patterns for one part of a host name, with the meaning of Go's `path.Match`: `*`, `?`, `[a-z]`, `[^a]`, `\c`.

/// True when the whole text matches. A malformed pattern matches nothing.
pub fn glob_matches(pattern: &str, text: &str) -> bool {
    let pattern: Vec<char> = pattern.chars().collect();
    let text: Vec<char> = text.chars().collect();
    matches(&pattern, &text)
}

fn matches(pattern: &[char], text: &[char]) -> bool {
    // Where to go on when what follows the last star does not fit: one more character for the star.
    let (mut p, mut t) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    loop {
        if pattern.get(p) == Some(&'*') {
            star = Some((p + 1, t));
            p += 1;
            continue;
        }
        if p == pattern.len() && t == text.len() {
            return true;
        }
        if let (true, Some(&c)) = (p < pattern.len(), text.get(t)) {
            match one(&pattern[p..], c) {
                Some((true, length)) => {
                    p += length;
                    t += 1;
                    continue;
                }
                Some((false, _)) => {}
                None => return false,
            }
        }
        match star {
            Some((after, from)) if from < text.len() => {
                star = Some((after, from + 1));
                p = after;
                t = from + 1;
            }
            _ => return false,
        }
    }
}

/// Whether the pattern's first element takes this character, and how long the element is. None: malformed.
fn one(pattern: &[char], c: char) -> Option<(bool, usize)> {
    match pattern[0] {
        '?' => Some((c != '/', 1)),
        '\\' => pattern.get(1).map(|p| (*p == c, 2)),
        '[' => class(pattern, c),
        p => Some((p == c, 1)),
    }
}

fn class(pattern: &[char], c: char) -> Option<(bool, usize)> {
    let mut at = 1;
    let negated = pattern.get(at) == Some(&'^');
    at += usize::from(negated);
    let (mut found, mut any) = (false, false);
    loop {
        if pattern.get(at) == Some(&']') && any {
            return Some((found != negated, at + 1));
        }
        let low = member(pattern, &mut at)?;
        let high = if pattern.get(at) == Some(&'-') {
            at += 1;
            member(pattern, &mut at)?
        } else {
            low
        };
        found |= (low..=high).contains(&c);
        any = true;
    }
}

fn member(pattern: &[char], at: &mut usize) -> Option<char> {
    let mut c = *pattern.get(*at)?;
    if matches!(c, '-' | ']') {
        return None;
    }
    if c == '\\' {
        *at += 1;
        c = *pattern.get(*at)?;
    }
    *at += 1;
    Some(c)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns() {
        for (pattern, text, want) in [
            ("", "", true),
            ("", "a", false),
            ("abc", "abc", true),
            ("*", "", true),
            ("*c", "abc", true),
            ("a*", "a", true),
            ("a*b*c", "axbxbxc", true),
            ("a*b", "ac", false),
            ("a?c", "abc", true),
            ("a?", "a", false),
            ("[a-c]x", "bx", true),
            ("[^a-c]x", "bx", false),
            ("[^a-c]x", "dx", true),
            ("[a", "a", false),
            ("[]a]", "]", false),
            ("\\*", "*", true),
            ("\\*", "x", false),
            ("a\\", "a", false),
            ("*-[0-9]", "reg-7", true),
        ] {
            assert_eq!(glob_matches(pattern, text), want, "{pattern:?} {text:?}");
        }
    }
}
