//! Changes to a template's text before it is compiled.

/// `source` as it is to be run here.
///
/// The blocks called `generation`, which only mark text for `transformers`, become blocks that are
/// known. And what is assigned to an attribute of a namespace, the only thing in a template that
/// can change, goes through the filter `keep`.
pub(in crate::text) fn prepare(source: &str) -> String {
    let mut edits: Vec<(usize, usize, &str)> = Vec::new();
    // Wherever a tag seems to begin, also within strings and comments: a change there does no
    // harm, and so no text can hide a tag.
    for (at, _) in source.match_indices("{%") {
        let at = at + 2;
        let rest = source.get(at..).unwrap_or_default();
        let tag = rest.strip_prefix(['-', '+']).unwrap_or(rest).trim_start();
        let start = source.len() - tag.len();
        let name = tag.len()
            - tag
                .trim_start_matches(|c: char| c.is_alphanumeric() || c == '_')
                .len();
        let end = || closing(tag.get(name..)?).map(|end| start + name + end);
        match tag.get(..name) {
            Some("generation") => edits.push((start, start + name, "if true")),
            Some("endgeneration") => edits.push((start, start + name, "endif")),
            Some("set") => {
                let Some(end) = end() else { continue };
                let assignment = source.get(start..end).unwrap_or_default();
                if let Some((target, _)) = assignment.split_once('=')
                    && target.contains('.')
                {
                    let value = start + target.len() + 1;
                    edits.extend([(value, value, "("), (end, end, ")|keep")]);
                }
            }
            _ => {}
        }
    }
    edits.sort_by_key(|edit| edit.0);
    let mut out = String::with_capacity(source.len());
    let mut done = 0;
    for (from, to, text) in edits {
        out.push_str(source.get(done..from).unwrap_or_default());
        out.push_str(text);
        done = to.max(done);
    }
    out.push_str(source.get(done..).unwrap_or_default());
    out
}

/// Where the tag that `rest` is within ends: before `%}`, `-%}` or `+%}`. `None` if it doesn't, or
/// closes a bracket that it has not opened.
fn closing(rest: &str) -> Option<usize> {
    let bytes = rest.as_bytes();
    let (mut depth, mut quote, mut at) = (0usize, None, 0);
    while let Some(byte) = bytes.get(at) {
        match (quote, byte) {
            (Some(_), b'\\') => at += 1,
            (Some(q), byte) if q == byte => quote = None,
            (Some(_), _) => {}
            (None, b'"' | b'\'') => quote = Some(byte),
            (None, b'(' | b'[' | b'{') => depth += 1,
            (None, b')' | b']' | b'}') => depth = depth.checked_sub(1)?,
            (None, b'%') if depth == 0 && bytes.get(at + 1) == Some(&b'}') => {
                let sign = at.checked_sub(1).and_then(|before| bytes.get(before));
                return Some(at - usize::from(matches!(sign, Some(b'-' | b'+'))));
            }
            (None, _) => {}
        }
        at += 1;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn templates_are_prepared() {
        for (source, want) in [
            (
                "a{%- generation -%} b {%- endgeneration %}{%",
                "a{%- if true -%} b {%- endif %}{%",
            ),
            ("{% set a.b = 1 -%}", "{% set a.b =( 1 )|keep-%}"),
            (
                "{%+set a . b='%}' ~ {'c':\"\\\"%}\"}%}",
                "{%+set a . b=('%}' ~ {'c':\"\\\"%}\"})|keep%}",
            ),
            (
                "{% set a.b = 1) if 1 else (a %}",
                "{% set a.b = 1) if 1 else (a %}",
            ),
            (
                "{# {% set a.b = ' #}{% set a.b = a %}",
                "{# {% set a.b = ' #}{% set a.b =( a )|keep%}",
            ),
            (
                "{% set a = b.c %}{% setting %}",
                "{% set a = b.c %}{% setting %}",
            ),
            ("{% set a.b %}x{% endset %}", "{% set a.b %}x{% endset %}"),
        ] {
            assert_eq!(prepare(source), want);
        }
    }
}
