//! A template environment that behaves like the one chat templates are written for: Jinja2, with
//! the settings and functions of `transformers`, and methods of Python's `str` and `dict`.

mod json;
mod prepare;
mod python;
mod time;

use std::time::SystemTime;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::ValueKind;
use minijinja::{Environment, Error, ErrorKind, State, Value};

use super::chat::View;
pub(super) use prepare::prepare;

/// How deep calls and macros may nest. Templates that print nested types recurse, but not far.
const MAX_DEPTH: usize = 100;

/// An environment whose templates stop with an error once they used up `fuel`: one unit an
/// instruction, and one for 64 bytes they make or look at. So fuel bounds memory too.
///
/// # Errors
/// None in practice: the syntax is one that `minijinja` knows.
pub(super) fn environment(fuel: u64) -> Result<Environment<'static>, Error> {
    let mut env = Environment::new();
    let mut syntax = SyntaxConfig::builder();
    env.set_syntax(syntax.trim_blocks(true).lstrip_blocks(true).build()?);
    env.set_recursion_limit(MAX_DEPTH);
    env.set_fuel(Some(fuel));
    // Errors don't quote the template: they are to be one line.
    env.set_debug(false);
    env.set_unknown_method_callback(python::method);
    env.add_filter("keep", keep);
    env.add_filter("tojson", json::to_json);
    env.add_function(
        "raise_exception",
        |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        },
    );
    env.add_function("strftime_now", |format: String| {
        time::strftime(&format, SystemTime::now())
    });
    Ok(env)
}

/// How deep a value in a namespace may nest.
const MAX_NESTING: usize = 32;

/// A copy of `value` that holds nothing that changes or is yet to be worked out.
///
/// Without this a namespace could hold itself, or in a loop grow into something that is as deep as
/// the loop is long; working with either takes more stack than there is.
fn keep(state: &State, value: &Value) -> Result<Value, Error> {
    copy(state, value, 0)
}

fn copy(state: &State, value: &Value, depth: usize) -> Result<Value, Error> {
    if depth > MAX_NESTING {
        return Err(invalid("a value in a namespace is nested too deeply"));
    }
    charge(state, 128)?;
    match value.kind() {
        // A message never changes.
        _ if value.downcast_object_ref::<View>().is_some() => Ok(value.clone()),
        ValueKind::Map => {
            let pairs = value.as_object().and_then(|map| map.try_iter_pairs());
            let pairs = pairs.into_iter().flatten();
            let pairs = pairs.map(|(k, v)| Ok((k, copy(state, &v, depth + 1)?)));
            Ok(Value::from_pairs(pairs.collect::<Result<Vec<_>, Error>>()?))
        }
        ValueKind::Seq | ValueKind::Iterable => {
            let items = value.try_iter()?.checked();
            let items = items.map(|item| copy(state, &item?, depth + 1));
            Ok(Value::from(items.collect::<Result<Vec<_>, Error>>()?))
        }
        _ => Ok(value.clone()),
    }
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

/// Pays for `bytes` before they are made.
fn charge(state: &State, bytes: usize) -> Result<(), Error> {
    state.consume_fuel(bytes as u64 / 64)
}

#[cfg(test)]
pub(in crate::text::jinja) mod tests {
    use super::*;

    pub(in crate::text::jinja) fn eval(template: &str) -> Result<String, String> {
        let env = environment(100_000).unwrap();
        env.render_str(template, ()).map_err(|e| e.to_string())
    }

    #[test]
    fn namespaces_hold_what_they_are_given() {
        let prepared = |source: &str| eval(&prepare(source));
        let source = "{% set n = namespace(a=1, l=[]) %}{% for i in [2, 3] %}{% set n.a = n.a + i %}\
            {% set n.l = n.l + [{'i': i}] %}{% set n.u = i.nothing %}{% endfor %}\
            {{ n.a }}{{ n.l }}{{ n.u is defined }}{% set n.b, n.c = 1, 'x' %}{{ n.b ~ n.c }}";
        assert_eq!(
            prepared(source).as_deref(),
            Ok("6[{'i': 2}, {'i': 3}]False1x")
        );
        for loops in [
            "{% set n = namespace() %}{% set n.x = n %}{% set n.x = n %}{{ n }}",
            "{% set n = namespace() %}{% set n.x = [n] %}{{ n == n.x }}{{ n ~ n }}",
            "{% set n = namespace() %}{% set m = namespace(n=n) %}{% set n.x, n.y = m, m %}{{ m }}",
        ] {
            assert!(prepared(loops).is_ok(), "{loops}");
        }
        let nest = "{% set n = namespace(x=[]) %}{% for i in range(99) %}{% set n.x = [n.x] %}{% endfor %}";
        assert!(prepared(nest).unwrap_err().contains("too deeply"));
    }

    #[test]
    fn no_template_runs_away() {
        for bomb in [
            "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
            "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
            "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set ns.x = ns.x.replace('a', 'aa') %}{% endfor %}",
            "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set ns.x = ns.x.join([ns.x, ns.x]) %}{% endfor %}",
            "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x|tojson }}",
            "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
            "{{ 'a' * 99999999 }}",
            "{{ raise_exception('no') }}",
            "{% include 'other' %}",
        ] {
            assert!(eval(bomb).is_err(), "{bomb}");
        }
    }
}
