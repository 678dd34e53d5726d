//! Chat templates: a conversation in, the text of the prompt out.

use std::collections::BTreeMap;
use std::sync::Arc;

use minijinja::Value;
use minijinja::value::{Enumerator, Object};

use super::{TextError, jinja, one_line};

/// Who says a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Role {
    /// Instructions for the whole conversation.
    System,
    /// The person.
    User,
    /// The model.
    Assistant,
    /// The result of a tool that the model called.
    Tool,
}

impl Role {
    /// What templates call it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }
}

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// Who says it.
    pub role: Role,
    /// What is said.
    pub content: String,
}

impl Message {
    /// What `role` says.
    pub fn new(role: Role, content: impl Into<String>) -> Self {
        let content = content.into();
        Self { role, content }
    }
}

/// A message as templates see it; its fields have the order in which `tojson` writes them.
#[derive(Debug)]
pub(super) struct View {
    role: &'static str,
    content: Value,
}

impl Object for View {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        match key.as_str()? {
            "role" => Some(Value::from(self.role)),
            "content" => Some(self.content.clone()),
            _ => None,
        }
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Str(&["role", "content"])
    }
}

/// The longest template that is run, in bytes. Real ones reach 30 kB.
const MAX_SOURCE: usize = 256 << 10;
/// Fuel that any template may use, about ten times what the longest known ones do.
const FUEL: u64 = 400_000;
/// And for each message.
const FUEL_PER_MESSAGE: u64 = 2_000;
const MAX_FUEL: u64 = 4_000_000;
/// The stack that a unit of fuel can cost, in bytes: it can make a value one level deeper, and
/// comparing, printing or dropping that value takes a call for each level.
const STACK_PER_FUEL: u64 = 1_024;

/// A checkpoint's chat template.
///
/// It runs as in `transformers`, without tools and documents: Jinja with `trim_blocks` and
/// `lstrip_blocks`, `raise_exception`, `strftime_now` (in UTC), `tojson`, and the methods of
/// Python's strings and dictionaries. It can't read anything but what it is given, and how long
/// it runs and how much it makes is limited in proportion to the conversation.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    source: String,
    /// Values of `bos_token` and the like.
    tokens: BTreeMap<&'static str, String>,
}

impl ChatTemplate {
    /// `tokens` are the variables that name special tokens (`bos_token`, `eos_token`).
    pub(super) fn new(source: &str, tokens: BTreeMap<&'static str, String>) -> Self {
        Self {
            source: source.to_owned(),
            tokens,
        }
    }

    /// The prompt for `messages`; with `add_generation_prompt` it ends where the assistant's
    /// answer begins. It contains special tokens, the one at the beginning included: encode it
    /// without adding more.
    ///
    /// # Errors
    /// The template is not valid, fails, refuses the conversation, or does not come to an end.
    pub fn render(
        &self,
        messages: &[Message],
        add_generation_prompt: bool,
    ) -> Result<String, TextError> {
        if self.source.len() > MAX_SOURCE {
            let what = format!("it is longer than {} kB", MAX_SOURCE >> 10);
            return Err(TextError::Template(what));
        }
        let bytes: u64 = messages.iter().map(|m| m.content.len() as u64).sum();
        let fuel = FUEL
            .saturating_add(FUEL_PER_MESSAGE.saturating_mul(messages.len() as u64))
            .saturating_add(bytes / 2)
            .min(MAX_FUEL);
        let views = messages.iter().map(|message| {
            Value::from_object(View {
                role: message.role.as_str(),
                content: Value::from(message.content.as_str()),
            })
        });
        let mut variables: BTreeMap<&str, Value> = BTreeMap::new();
        for (name, token) in &self.tokens {
            variables.insert(name, Value::from(token));
        }
        variables.insert("messages", views.collect());
        variables.insert("add_generation_prompt", Value::from(add_generation_prompt));
        // Templates ask whether there are any, and `transformers` always defines them.
        variables.insert("tools", Value::from(()));
        variables.insert("documents", Value::from(()));
        let source = jinja::prepare(&self.source);
        let render = move || {
            let env = jinja::environment(fuel)?;
            let template = env.template_from_str(&source)?;
            template.render(Value::from(variables))
        };
        match on_own_stack(fuel, render) {
            Some(rendered) => rendered
                .map_err(|e: minijinja::Error| TextError::Template(one_line(&e.to_string()))),
            None => Err(TextError::Template("it can't be run".to_owned())),
        }
    }
}

/// Runs `work` on a thread with stack enough for what a template can make of `fuel`. The stack is
/// only reserved: what is not touched takes no memory. `None` if there is no such thread, or
/// `work` panics.
fn on_own_stack<T: Send>(fuel: u64, work: impl FnOnce() -> T + Send) -> Option<T> {
    let size = (32 << 20) + fuel.saturating_mul(STACK_PER_FUEL);
    let thread = std::thread::Builder::new()
        .name("chat template".to_owned())
        .stack_size(usize::try_from(size).ok()?);
    std::thread::scope(|scope| thread.spawn_scoped(scope, work).ok()?.join().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn render(source: &str, messages: &[Message]) -> Result<String, TextError> {
        let tokens = BTreeMap::from([("bos_token", "<s>".to_owned())]);
        ChatTemplate::new(source, tokens).render(messages, true)
    }

    fn user(content: &str) -> Vec<Message> {
        vec![Message::new(Role::User, content)]
    }

    #[test]
    fn messages_tokens_and_whitespace() {
        let source = "{{ bos_token }}{{ eos_token }}\n{% for m in messages %}\n  {% if m.role == 'user' %}\n\
            U: {{ m['content'].strip() }}\n  {% endif %}\n{% endfor %}\n{% if add_generation_prompt %}A:{% endif %}\n";
        assert_eq!(render(source, &user(" hi ")).unwrap(), "<s>\nU: hi\nA:");
    }

    #[test]
    fn a_message_is_a_dictionary() {
        let source = "{{ messages|tojson }}{% for k, v in messages[0].items() %}{{ k }}{% endfor %}\
            {{ 'name' in messages[0] }}{{ messages[0].name is defined }}\
            {{ messages[0] is mapping }}{{ messages[0].content is string }}{{ tools is none }}";
        let text = render(source, &user("a")).unwrap();
        let text = text.to_lowercase();
        let want = r#"[{"role": "user", "content": "a"}]rolecontentfalsefalsetruetruetrue"#;
        assert_eq!(text, want);
    }

    #[test]
    fn errors_are_one_line() {
        let refusal = render("\n{{ raise_exception('no\nsystem \u{1b}[31m') }}", &[]).unwrap_err();
        let text = refusal.to_string();
        assert!(
            text.contains("no system") && !text.contains(char::is_control),
            "{text}"
        );
        for broken in [
            "{% if %}",
            "{{ messages[0].a.b }}",
            "{{ x() }}",
            "{{ 'a' | nothing }}",
        ] {
            let text = render(broken, &user("a")).unwrap_err().to_string();
            assert!(text.starts_with("chat template: ") && text.lines().count() == 1);
        }
        let deep = "{% if 1 %}".repeat(100_000) + &"(".repeat(100_000);
        assert!(render(&deep, &[]).is_err());
        let forever =
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}";
        assert!(render(forever, &[]).is_err());
    }

    #[test]
    fn long_conversations_have_fuel_enough() {
        let source = "{% for m in messages %}{% set c = m.content | trim %}{{ m.role + c + '\n' }}{% endfor %}";
        let mut messages = user(&"a".repeat(4 << 20));
        messages.extend(std::iter::repeat_n(
            Message::new(Role::Assistant, "b"),
            5000,
        ));
        assert!(render(source, &messages).is_ok());
    }

    /// Without a stack of its own, each of these ends the process.
    #[test]
    fn deep_values_are_no_harm() {
        let nest = "{% set x = [x] %}".repeat(14_000);
        let deeper = format!(
            "{{% macro m(x, n) %}}{}{{% if n %}}{{{{ m(x, n - 1) }}}}{{% endif %}}{{% endmacro %}}",
            "{% set x = [x] %}".repeat(12_000)
        );
        for source in [
            nest.clone(),
            format!("{nest}{{{{ x }}}}"),
            format!("{nest}{{% set y = x %}}{{{{ [x] == [y] }}}}"),
            format!("{nest}{{{{ x|tojson }}}}"),
            format!("{deeper}{{{{ m([], 20) }}}}"),
            format!(
                "{{% set x = [1]{} %}}{{{{ x }}}}",
                "|batch(1)".repeat(14_000)
            ),
            format!("{{{{ [1]{}|list }}}}", "|map('upper')".repeat(12_000)),
        ] {
            let _ = render(&source, &[]);
        }
        assert!(render(&" ".repeat(MAX_SOURCE + 1), &[]).is_err());
    }
}
