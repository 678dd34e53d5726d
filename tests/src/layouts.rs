//! The plugin ABI as text: every type that crosses, as `abi_stable` describes it, every code and constant.
//!
//! Types are found by following the root module: what is not reached from there the layout gate does not see
//! either. Nothing in the text depends on the compiler's version. Paragraphs begin with what they describe; a
//! line in them is a slot, field or code: its index, offset or number, its name and its type.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{Debug, Write};

use plugin_api::abi::{self, PluginModuleRef};
use plugin_api::abi_stable::StableAbi;
use plugin_api::abi_stable::type_layout::{TLData, TLField, TLFunction, TypeLayout};

/// Where types of the ABI itself are declared; the others are those of `abi_stable` and primitive ones.
const PACKAGE: &str = "mlxhost-plugin-api";

/// The whole description: our own types, codes and constants, then the types of `abi_stable` in them.
pub fn describe() -> String {
    let mut types = BTreeMap::new();
    follow(PluginModuleRef::LAYOUT, &mut types);
    let mut text = String::new();
    for is_own in [true, false] {
        for (name, layout) in &types {
            if is_own == (layout.package().as_str() == PACKAGE) {
                text += &section(name, layout);
            }
        }
        if is_own {
            text += &codes();
            text += &constants();
        }
    }
    text
}

/// Adds a type and all that it consists of.
fn follow(layout: &'static TypeLayout, types: &mut BTreeMap<String, &'static TypeLayout>) {
    let name = title(layout);
    if types.insert(name, layout).is_some() {
        return;
    }
    let fields = layout.get_fields();
    let fields = fields.iter().flat_map(|fields| fields.iter());
    for field in fields.chain(layout.phantom_fields().iter()) {
        follow(field.layout(), types);
        for function in field.function_range().iter() {
            for (_, layout) in signature(&function) {
                follow(layout, types);
            }
        }
    }
}

/// A type's name with what it is made for: `abi_stable` leaves out what a type is generic over.
fn title(layout: &'static TypeLayout) -> String {
    let name = layout.name();
    let fields = || layout.get_fields().into_iter().flat_map(|all| all.to_vec());
    // Of slices and vectors: a pointer, or the same as never null.
    let target = |pointer: &'static TypeLayout| match pointer.get_fields() {
        Some(fields) => fields.iter().next().map_or(pointer, |field| field.layout()),
        None => pointer,
    };
    let pointee = |pointer: &'static TypeLayout| {
        let pointee = pointer.phantom_fields().iter().next();
        pointee.map_or_else(String::new, |field| title(field.layout()))
    };
    match name {
        "&" => format!("&{}", pointee(layout)),
        "&mut" | "*const" | "*mut" => format!("{name} {}", pointee(layout)),
        "NonNull" | "PhantomData" => {
            let pointer = target(layout);
            format!("{name}<{}>", pointee(pointer))
        }
        "RSlice" | "RSliceMut" | "RVec" => {
            let first = fields().next().map(|field| pointee(target(field.layout())));
            format!("{name}<{}>", first.unwrap_or_default())
        }
        "ROption" | "RResult" | "Tuple2" => {
            let parts: Vec<_> = fields().map(|field| shown(&field)).collect();
            format!("{name}<{}>", parts.join(", "))
        }
        _ => layout.full_type().to_string(),
    }
}

/// Parameters by name; what is returned has none.
fn signature(function: &TLFunction) -> Vec<(&'static str, &'static TypeLayout)> {
    let names = function.param_names.as_str().split(',');
    let params = names.zip(function.param_type_layouts.iter());
    let params = params.map(|(name, layout)| (name, layout()));
    let returned = function.return_type_layout().map(|layout| ("", layout()));
    params.chain(returned).collect()
}

fn section(name: &str, layout: &'static TypeLayout) -> String {
    let mut text = String::new();
    let (size, align) = (layout.size(), layout.alignment());
    if size == 0 || layout.name() == "NonNull" {
        return text;
    }
    let data = layout.data();
    let (kind, fields) = match &data {
        TLData::PrefixType(table) => {
            let (first, all) = (table.first_suffix_field, table.fields.len());
            // Its size grows with the slots.
            let _ = writeln!(
                text,
                "table {name}: the first {first} slots are always there"
            );
            assert!(all <= 64, "abi_stable allows for no more than 64 slots");
            ("table", table.fields)
        }
        TLData::Struct { fields } => ("struct", *fields),
        TLData::Union { fields } => ("union", *fields),
        TLData::Enum(variants) => ("enum", variants.fields),
        // A number, a pointer or a function: said by the name.
        TLData::Primitive(_) | TLData::Opaque => return String::new(),
    };
    if kind != "table" {
        let repr = layout.repr_attr();
        let _ = writeln!(
            text,
            "{kind} {name}: {size} bytes, aligned to {align}, {repr:?}"
        );
    }
    if let TLData::Enum(variants) = &data {
        let counts = variants.field_count.iter();
        for (variant, count) in variants.variant_names_iter().zip(counts) {
            let _ = writeln!(text, "  {variant}, fields: {count}");
        }
    }
    let mut end = 0_usize;
    for (index, field) in fields.iter().enumerate() {
        let at = match kind {
            "table" => index,
            "struct" => {
                let start = end.next_multiple_of(field.layout().alignment());
                end = start + field.layout().size();
                start
            }
            _ => 0,
        };
        let _ = writeln!(text, "  {at} {}: {}", field.name(), shown(&field));
    }
    if kind == "struct" && !fields.is_empty() {
        // So the places above are what the compiler does, too.
        assert_eq!(
            end.next_multiple_of(align),
            size,
            "{name} is not laid out as in C"
        );
    }
    text + "\n"
}

/// A field's type, with the signature of a function.
fn shown(field: &TLField) -> String {
    let functions: Vec<_> = field.function_range().iter().collect();
    let written: Vec<_> = functions.iter().map(written).collect();
    match (functions.len(), field.is_function()) {
        (0, _) => title(field.layout()),
        (1, true) => written[0].clone(),
        _ => format!("{} of {}", field.layout().name(), written.join(", ")),
    }
}

fn written(function: &TLFunction) -> String {
    let parts = signature(function).into_iter();
    let parts = parts.map(|(name, layout)| match name {
        "" => title(layout),
        name => format!("{name}: {}", title(layout)),
    });
    let mut parts: Vec<String> = parts.collect();
    let returned = match function.return_type_layout() {
        Some(_) => parts.pop().unwrap_or_default(),
        None => "()".to_owned(),
    };
    format!("fn({}) -> {returned}", parts.join(", "))
}

fn codes() -> String {
    fn list<T: Debug + Copy>(all: &[T], number: impl Fn(T) -> u32) -> String {
        let name = std::any::type_name::<T>();
        let name = name.rsplit("::").next().unwrap_or(name);
        let mut text = format!("codes {name}\n");
        for &code in all {
            let _ = writeln!(text, "  {code:?} = {}", number(code));
        }
        text + "\n"
    }
    let tap = |name, tap: abi::Tap| format!("  {name} = {}\n", tap.point);
    [
        list(abi::AttentionMask::ALL, |code| code.0),
        list(abi::BinaryOp::ALL, |code| code.0),
        list(abi::DType::ALL, |code| code.0),
        list(abi::DonorKind::ALL, |code| code.0),
        list(abi::FaultCode::ALL, |code| code.0),
        list(abi::LogLevel::ALL, |code| code.0),
        list(abi::ReduceOp::ALL, |code| code.0),
        "codes Tap\n".to_owned(),
        tap("EMBEDDING", abi::Tap::EMBEDDING),
        tap("PRE_NORM", abi::Tap::PRE_NORM),
        tap("FINAL", abi::Tap::FINAL),
        "\n".to_owned(),
        list(abi::UnaryOp::ALL, |code| code.0),
    ]
    .concat()
}

fn constants() -> String {
    let none = (abi::UnaryOp::NONE.0, abi::RawTensor::NULL.0 as usize);
    [
        "constants\n".to_owned(),
        format!("  HEADER_SYMBOL = {}\n", abi::HEADER_SYMBOL),
        format!("  MAX_MANIFEST_BYTES = {}\n", abi::MAX_MANIFEST_BYTES),
        format!("  MAX_RANK = {}\n", abi::MAX_RANK),
        // Beginning with `.` in ELF files and with `__` in Mach-O ones.
        format!(
            "  SECTION = {}\n",
            abi::SECTION.trim_start_matches(['.', '_'])
        ),
        format!("  UnaryOp::NONE = {}\n", none.0),
        format!("  RawTensor::NULL = {}\n\n", none.1),
    ]
    .concat()
}

/// What a minor version may not do, in words: `new` is to be `old` with more slots, codes and types.
pub fn broken_promises(old: &str, new: &str) -> Vec<String> {
    let new = paragraphs(new);
    let broken = paragraphs(old).into_iter().filter_map(|(name, lines)| {
        let Some(now) = new.get(name) else {
            return Some(format!("{name} is gone"));
        };
        let may_grow = name.starts_with("table ") || name.starts_with("codes ");
        match may_grow {
            true if now.starts_with(&lines) => None,
            false if *now == lines => None,
            true => Some(format!("{name} has changed other than at its end")),
            false => Some(format!("{name} has changed, and can't grow")),
        }
    });
    broken.collect()
}

/// The lines that differ, below the name of what they belong to.
pub fn difference(old: &str, new: &str) -> String {
    let (old, new) = (paragraphs(old), paragraphs(new));
    let names: BTreeSet<_> = old.keys().chain(new.keys()).collect();
    let mut text = String::new();
    for name in names {
        let lines = |of: &BTreeMap<_, Vec<_>>| of.get(*name).cloned().unwrap_or_default();
        let (old, new) = (lines(&old), lines(&new));
        if old != new {
            let _ = writeln!(text, "{name}");
            for line in old.iter().filter(|line| !new.contains(line)) {
                let _ = writeln!(text, "-{line}");
            }
            for line in new.iter().filter(|line| !old.contains(line)) {
                let _ = writeln!(text, "+{line}");
            }
        }
    }
    text
}

/// Paragraphs by what they describe.
fn paragraphs(text: &str) -> BTreeMap<&str, Vec<&str>> {
    let paragraphs = text.split("\n\n").map(|paragraph| paragraph.trim_end());
    let named = paragraphs.filter(|paragraph| !paragraph.is_empty() && !paragraph.starts_with('#'));
    let named = named.map(|paragraph| {
        let lines: Vec<_> = paragraph.lines().collect();
        let first = lines[0];
        (first.split_once(':').map_or(first, |(name, _)| name), lines)
    });
    named.collect()
}
