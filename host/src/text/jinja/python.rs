//! The methods of Python's `str`, `dict` and `list` that templates call.

use minijinja::value::{Tuple, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};

use super::{charge, invalid};

/// A method of a Python value.
pub(super) fn method(
    state: &mut State,
    value: &Value,
    name: &str,
    args: &[Value],
) -> Result<Value, Error> {
    match (value.as_str(), value.kind()) {
        (Some(text), _) => string_method(state, text, name, args),
        (None, ValueKind::Map) => map_method(value, name, args),
        (None, ValueKind::Seq | ValueKind::Iterable) if name == "count" => {
            let (wanted,): (&Value,) = from_args(args)?;
            let mut count = 0;
            for item in value.try_iter()?.checked() {
                count += usize::from(item? == *wanted);
                charge(state, 64)?;
            }
            Ok(Value::from(count))
        }
        _ => Err(Error::from(ErrorKind::UnknownMethod)),
    }
}

fn string_method(state: &State, s: &str, name: &str, args: &[Value]) -> Result<Value, Error> {
    // Every method looks at the whole string.
    charge(state, s.len())?;
    let all = |test: fn(char) -> bool| !s.is_empty() && s.chars().all(test);
    Ok(match name {
        "strip" | "lstrip" | "rstrip" => {
            let (chars,): (Option<&str>,) = from_args(args)?;
            if let Some(chars) = chars {
                charge(state, s.len().saturating_mul(chars.len()))?;
            }
            let cut = |c: char| chars.map_or(c.is_whitespace(), |chars| chars.contains(c));
            Value::from(match name {
                "strip" => s.trim_matches(cut),
                "lstrip" => s.trim_start_matches(cut),
                _ => s.trim_end_matches(cut),
            })
        }
        "split" | "rsplit" => {
            let (sep, limit): (Option<&str>, Option<i64>) = from_args(args)?;
            let limit = limit.and_then(|limit| usize::try_from(limit).ok());
            split(state, s, sep, limit, name == "rsplit")?
        }
        "splitlines" => {
            from_args::<()>(args)?;
            charge(state, s.len().saturating_mul(24))?;
            s.lines().map(Value::from).collect()
        }
        "startswith" | "endswith" => {
            let (wanted,): (&Value,) = from_args(args)?;
            let test = |affix: &Value| match (affix.as_str(), name) {
                (Some(affix), "startswith") => Ok(s.starts_with(affix)),
                (Some(affix), _) => Ok(s.ends_with(affix)),
                (None, _) => Err(invalid(format!("{name} wants a string or strings"))),
            };
            if wanted.as_str().is_some() {
                return test(wanted).map(Value::from);
            }
            for affix in wanted.try_iter()?.checked() {
                if test(&affix?)? {
                    return Ok(Value::from(true));
                }
            }
            Value::from(false)
        }
        "removeprefix" | "removesuffix" => {
            let (affix,): (&str,) = from_args(args)?;
            let rest = match name {
                "removeprefix" => s.strip_prefix(affix),
                _ => s.strip_suffix(affix),
            };
            Value::from(rest.unwrap_or(s))
        }
        "replace" => {
            let (old, new, count): (&str, &str, Option<i64>) = from_args(args)?;
            let count = count.and_then(|c| usize::try_from(c).ok());
            let found = s.matches(old).count().min(count.unwrap_or(usize::MAX));
            charge(state, found.saturating_mul(new.len()))?;
            Value::from(s.replacen(old, new, found))
        }
        "find" | "rfind" | "index" => {
            let (wanted,): (&str,) = from_args(args)?;
            let at = match name {
                "rfind" => s.rfind(wanted),
                _ => s.find(wanted),
            };
            match at.and_then(|at| s.get(..at)) {
                Some(before) => Value::from(before.chars().count()),
                None if name == "index" => return Err(invalid("substring not found")),
                None => Value::from(-1),
            }
        }
        "count" => {
            let (wanted,): (&str,) = from_args(args)?;
            Value::from(s.matches(wanted).count())
        }
        "join" => {
            let (parts,): (&Value,) = from_args(args)?;
            let mut joined = String::new();
            for (i, part) in parts.try_iter()?.checked().enumerate() {
                let part = part?;
                let Some(part) = part.as_str() else {
                    return Err(invalid("join wants strings"));
                };
                charge(state, 64 + s.len() + part.len())?;
                joined.push_str(if i == 0 { "" } else { s });
                joined.push_str(part);
            }
            Value::from(joined)
        }
        "upper" | "lower" | "title" | "capitalize" | "isdigit" | "isnumeric" | "isalpha"
        | "isalnum" | "isspace" | "isupper" | "islower" => {
            from_args::<()>(args)?;
            match name {
                "upper" => Value::from(s.to_uppercase()),
                "lower" => Value::from(s.to_lowercase()),
                "title" => Value::from(capitalized(s, |before| !before.is_alphabetic())),
                "capitalize" => Value::from(capitalized(s, |_| false)),
                "isdigit" | "isnumeric" => Value::from(all(char::is_numeric)),
                "isalpha" => Value::from(all(char::is_alphabetic)),
                "isalnum" => Value::from(all(char::is_alphanumeric)),
                "isspace" => Value::from(all(char::is_whitespace)),
                "isupper" => Value::from(s != s.to_lowercase() && s == s.to_uppercase()),
                _ => Value::from(s != s.to_uppercase() && s == s.to_lowercase()),
            }
        }
        _ => return Err(Error::from(ErrorKind::UnknownMethod)),
    })
}

fn map_method(value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let Some(map) = value.as_object() else {
        return Err(Error::from(ErrorKind::UnknownMethod));
    };
    if name == "get" {
        let (key, default): (&Value, Option<Value>) = from_args(args)?;
        return Ok(map.get_value(key).or(default).unwrap_or(Value::from(())));
    }
    let pairs = map.try_iter_pairs().into_iter().flatten();
    let values: Value = match name {
        "items" => pairs
            .map(|(k, v)| Value::from(Tuple::from([k, v])))
            .collect(),
        "keys" => pairs.map(|(k, _)| k).collect(),
        "values" => pairs.map(|(_, v)| v).collect(),
        _ => return Err(Error::from(ErrorKind::UnknownMethod)),
    };
    from_args::<()>(args)?;
    Ok(values)
}

/// `s.split(sep, limit)`, or `rsplit`; without `sep`, at runs of whitespace.
fn split(
    state: &State,
    s: &str,
    sep: Option<&str>,
    limit: Option<usize>,
    from_right: bool,
) -> Result<Value, Error> {
    if sep == Some("") {
        return Err(invalid("empty separator"));
    }
    let mut parts = Vec::new();
    let trim = |rest: &mut &str| match (sep, from_right) {
        (Some(_), _) => {}
        (None, false) => *rest = rest.trim_start(),
        (None, true) => *rest = rest.trim_end(),
    };
    let mut rest = s;
    trim(&mut rest);
    while parts.len() < limit.unwrap_or(usize::MAX) {
        let cut = match (sep, from_right) {
            (Some(sep), false) => rest.split_once(sep),
            (Some(sep), true) => rest.rsplit_once(sep),
            (None, false) => rest.split_once(char::is_whitespace),
            (None, true) => rest.rsplit_once(char::is_whitespace),
        };
        let Some((left, right)) = cut else { break };
        let part = if from_right { right } else { left };
        charge(state, 64 + part.len())?;
        parts.push(Value::from(part));
        rest = if from_right { left } else { right };
        trim(&mut rest);
    }
    // With a separator the rest always counts, without one only if something is left.
    if sep.is_some() || !rest.trim().is_empty() {
        parts.push(Value::from(rest));
    }
    if from_right {
        parts.reverse();
    }
    Ok(Value::from(parts))
}

/// `s` in lower case, but for its first character and those after one that `starts` a word.
fn capitalized(s: &str, starts: fn(char) -> bool) -> String {
    let mut before = None;
    let mut out = String::with_capacity(s.len());
    for c in s.chars() {
        if before.is_none_or(starts) {
            out.extend(c.to_uppercase());
        } else {
            out.extend(c.to_lowercase());
        }
        before = Some(c);
    }
    out
}

#[cfg(test)]
mod tests {
    use crate::text::jinja::tests::eval;

    #[test]
    fn python_methods() {
        for (expression, want) in [
            ("'  a b '.strip()", "\"a b\""),
            ("'xxaxx'.lstrip('x')", "\"axx\""),
            ("'</think>a'.rstrip('a')", "\"</think>\""),
            ("'a,b,,c'.split(',')", r#"["a", "b", "", "c"]"#),
            ("'a,b,c'.split(',', 1)", r#"["a", "b,c"]"#),
            ("'a,b,c'.rsplit(',', 1)", r#"["a,b", "c"]"#),
            ("'a,b'.split(',')[-1]", "\"b\""),
            ("'  a  b c '.split()", r#"["a", "b", "c"]"#),
            ("'  a  b c '.split(none, 1)", r#"["a", "b c "]"#),
            ("' a  b  c '.rsplit(none, 1)", r#"[" a  b", "c"]"#),
            ("'  '.split()", "[]"),
            ("''.split(',')", "[\"\"]"),
            ("'a\nb'.splitlines()", r#"["a", "b"]"#),
            ("'abc'.startswith('ab')", "true"),
            ("'abc'.endswith(('x', 'bc'))", "true"),
            ("'abc'.removeprefix('a').removesuffix('c')", "\"b\""),
            ("'aaa'.replace('a', 'bc', 2)", "\"bcbca\""),
            ("'äab'.find('b')", "2"),
            ("'ab'.find('x')", "-1"),
            ("', '.join(['a', 'b'])", "\"a, b\""),
            ("'heLLo woRLD'.title()", "\"Hello World\""),
            ("'heLLo woRLD'.capitalize()", "\"Hello world\""),
            ("'Ab'.upper() + 'Ab'.lower()", "\"ABab\""),
            ("{'a': 1}.items()|list", "[[\"a\", 1]]"),
            ("{'a': 1}.get('b', 2)", "2"),
            ("{'a': 1}.get('b')", "null"),
            (
                "{'a': 1}.keys()|list + {'a': 1}.values()|list",
                "[\"a\", 1]",
            ),
            ("[1, 2, 1].count(1)", "2"),
        ] {
            let got = eval(&format!("{{{{ ({expression})|tojson }}}}"));
            assert_eq!(got.as_deref(), Ok(want), "{expression}");
        }
        for unknown in ["'a'.format_map()", "[1].append(2)", "(1).strip()"] {
            assert!(eval(&format!("{{{{ {unknown} }}}}")).is_err(), "{unknown}");
        }
    }
}
