//! Where a checkpoint of a multimodal family keeps its text model.

use plugin_api::Weights;

/// The two places that matter.
pub(super) struct Layout {
    /// `embed_tokens`, `layers`, `norm`.
    pub model: Weights,
    /// `lm_head`.
    pub head: Weights,
    /// Whether the names are those that MLX's converters give.
    pub converted: bool,
}

impl Layout {
    /// Three layouts are read: converted for MLX (`language_model.` before everything), raw
    /// (`model.language_model.`), and raw text-only (`model.`).
    pub fn find(w: &Weights) -> Self {
        let probe = |w: &Weights| w.child("embed_tokens").contains("weight");
        let converted = w.child("language_model");
        if probe(&converted.child("model")) {
            return Self {
                model: converted.child("model"),
                head: converted,
                converted: true,
            };
        }
        let raw = w.child("model").child("language_model");
        let model = if probe(&raw) { raw } else { w.child("model") };
        Self {
            model,
            head: w.clone(),
            converted: false,
        }
    }
}
