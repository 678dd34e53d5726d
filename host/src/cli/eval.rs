//! `mlxhost eval`: logits and hidden states for comparing with other engines.

use std::borrow::Cow;
use std::path::Path;
use std::sync::Arc;

use mlxhost::backend;
use mlxhost::checkpoint::Checkpoint;
use mlxhost::model::Model;
use plugin_api::layers::Step;
use plugin_api::{Tap, Tensor};
use safetensors::{Dtype, View};

use super::args::EvalArgs;
use super::error::CliError;
use super::prompt;

/// One forward pass over the prompt, written to a file.
pub fn run(args: &EvalArgs) -> Result<(), CliError> {
    let ids = prompt::parse_tokens(&args.prompt_tokens)?;
    let taps = args.taps.iter().map(|text| parse_tap(text));
    let taps = taps.collect::<Result<Vec<_>, _>>()?;
    args.compute.apply();
    backend::install();
    let kv = args.kv.config()?;
    let model = Model::load_with(Arc::new(Checkpoint::open(&args.model)?), None, &kv)?;
    let facts = model.facts();
    if let Some(id) = ids.iter().find(|id| !(0..facts.vocab_size).contains(*id)) {
        let vocab = facts.vocab_size;
        return Err(CliError::input(format!(
            "token {id} is outside the vocabulary of {vocab}"
        )));
    }
    if let Some((text, _)) = args
        .taps
        .iter()
        .zip(&taps)
        // Drafters may count the last hidden as one layer more; here it has a name.
        .find(|(_, tap)| !model.has_tap(**tap) || tap.point == model.facts().layers)
    {
        let layers = facts.layers;
        return Err(CliError::input(format!(
            "--taps {text}: the model has {layers} layers"
        )));
    }
    let width = i32::try_from(ids.len()).map_err(|_| CliError::input("too many tokens"))?;
    let step = Step::new(&[0], &[width], width, false)?;
    let tokens = Tensor::from_slice(&ids, &[1, width])?;
    let pass = model.forward(&tokens, &step, &mut model.new_caches(), &taps)?;
    let mut written = vec![(
        "logits".to_owned(),
        Rows::read(&model.logits(&pass.hidden)?)?,
    )];
    for (text, tap) in args.taps.iter().zip(&pass.taps) {
        written.push((format!("tap.{text}"), Rows::read(tap)?));
    }
    // Written beside and renamed: an interrupted run leaves no half file under that name.
    let failed = |e: &dyn std::fmt::Display| {
        CliError::Failure(format!("{}: can't write: {e}", args.out.display()))
    };
    let dir = args.out.parent().filter(|dir| !dir.as_os_str().is_empty());
    let dir = dir.unwrap_or_else(|| Path::new("."));
    let temporary = new_file(dir).map_err(|e| failed(&e.kind()))?;
    safetensors::serialize_to_file(written, None, temporary.path()).map_err(|e| failed(&e))?;
    temporary.persist(&args.out).map_err(|e| failed(&e.error))?;
    Ok(())
}

/// A temporary file with the mode that any new file of the user has.
fn new_file(dir: &Path) -> std::io::Result<tempfile::NamedTempFile> {
    use std::os::unix::fs::PermissionsExt;
    tempfile::Builder::new()
        .permissions(std::fs::Permissions::from_mode(0o666))
        .tempfile_in(dir)
}

fn parse_tap(text: &str) -> Result<Tap, CliError> {
    match text {
        "embedding" => Ok(Tap::EMBEDDING),
        "pre_norm" => Ok(Tap::PRE_NORM),
        "final" => Ok(Tap::FINAL),
        number => match number.parse::<u16>() {
            Ok(layer) => Ok(Tap::layer(i32::from(layer))),
            Err(_) => Err(CliError::input(format!(
                "--taps {text}: expected a layer number, embedding, pre_norm or final"
            ))),
        },
    }
}

/// A `[1, N, W]` tensor as `[N, W]` f32 bytes.
struct Rows {
    shape: [usize; 2],
    bytes: Vec<u8>,
}

impl Rows {
    fn read(tensor: &Tensor) -> Result<Self, CliError> {
        let [_, n, width] = tensor.dims()?;
        let values = tensor.to_vec::<f32>()?;
        Ok(Self {
            shape: [n as usize, width as usize],
            bytes: values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        })
    }
}

impl View for Rows {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}
