//! The filter `tojson`.

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, State, Value};

use super::{MAX_DEPTH, charge, invalid};

/// `json.dumps` of Python, as `transformers` calls it: other than Jinja's own filter it doesn't
/// escape for HTML, and it has a space after separators.
pub(super) fn to_json(state: &State, value: &Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    for ignored in ["ensure_ascii", "sort_keys", "separators"] {
        let _: Option<Value> = options.get(ignored)?;
    }
    options.assert_all_used()?;
    let mut json = Json {
        state,
        indent: indent.map(|n| n.min(16)),
        text: String::new(),
    };
    json.write(value, 0)?;
    Ok(Value::from(json.text))
}

struct Json<'a, 'b, 'c> {
    state: &'a State<'b, 'c>,
    indent: Option<usize>,
    text: String,
}

impl Json<'_, '_, '_> {
    fn write(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(invalid("tojson: nested too deeply"));
        }
        // Also pays for the indentation.
        charge(self.state, 64 + depth * 16)?;
        if let Some(text) = value.as_str() {
            charge(self.state, text.len())?;
            self.string(text);
            return Ok(());
        }
        match value.kind() {
            ValueKind::None => self.text.push_str("null"),
            ValueKind::Bool => self
                .text
                .push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.text.push_str(&value.to_string()),
            ValueKind::Map => {
                let Some(map) = value.as_object() else {
                    return Err(invalid("tojson: not a value of JSON"));
                };
                let mut any = false;
                self.text.push('{');
                for (key, value) in map.try_iter_pairs().into_iter().flatten() {
                    self.next(any, depth + 1);
                    any = true;
                    match key.as_str() {
                        Some(key) => self.string(key),
                        None => self.string(&key.to_string()),
                    }
                    self.text.push_str(": ");
                    self.write(&value, depth + 1)?;
                }
                self.close(any, depth, '}');
            }
            ValueKind::Seq | ValueKind::Iterable => {
                let mut any = false;
                self.text.push('[');
                for item in value.try_iter()?.checked() {
                    self.next(any, depth + 1);
                    any = true;
                    self.write(&item?, depth + 1)?;
                }
                self.close(any, depth, ']');
            }
            kind => return Err(invalid(format!("tojson: {kind} is not a value of JSON"))),
        }
        Ok(())
    }

    fn string(&mut self, text: &str) {
        // The escapes are those of Python.
        self.text
            .push_str(&serde_json::Value::from(text).to_string());
    }

    /// Begins an item.
    fn next(&mut self, any: bool, depth: usize) {
        match (any, self.indent) {
            (true, None) => self.text.push_str(", "),
            (true, Some(_)) => self.text.push(','),
            (false, _) => {}
        }
        self.line(depth);
    }

    fn close(&mut self, any: bool, depth: usize, bracket: char) {
        if any {
            self.line(depth);
        }
        self.text.push(bracket);
    }

    fn line(&mut self, depth: usize) {
        if let Some(indent) = self.indent {
            self.text.push('\n');
            self.text.extend(std::iter::repeat_n(' ', indent * depth));
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::text::jinja::tests::eval;

    #[test]
    fn json_is_that_of_python() {
        let got = eval("{{ {'a': [1, 2.0, none, true, '<\"ä\n'], 'b': {}}|tojson }}");
        let want = r#"{"a": [1, 2.0, null, true, "<\"ä\n"], "b": {}}"#;
        assert_eq!(got.as_deref(), Ok(want));
        let got = eval("{{ {'a': [1, []]}|tojson(indent=2) }}");
        assert_eq!(got.as_deref(), Ok("{\n  \"a\": [\n    1,\n    []\n  ]\n}"));
    }
}
