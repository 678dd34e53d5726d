//! What the CPU kernels cost: a quantized product at the sizes of small and middling models, by rows.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use mlxhost::kernels::matrix::Matrix;
use mlxhost::kernels::project::Project;
use mlxhost::kernels::quantized::{QuantizedMatrix, Scales};

fn quantized(c: &mut Criterion) {
    for (outputs, inputs) in [(1536, 576), (4096, 4096)] {
        let words = vec![0x1234_5678u32; outputs * inputs / 8];
        let scales = vec![0.01f32; outputs * inputs / 32];
        let matrix = QuantizedMatrix {
            words: &words,
            scales: Scales::F32(&scales),
            biases: Scales::F32(&scales),
            outputs,
            inputs,
            group: 32,
            bits: 4,
        };
        let mut group = c.benchmark_group(format!("4-bit {outputs}x{inputs}"));
        group.throughput(Throughput::Elements((outputs * inputs) as u64));
        for (name, exact) in [("16-bit activations", false), ("exact", true)] {
            for rows in [1, 2, 4, 8, 16, 64] {
                let x = vec![0.5f32; rows * inputs];
                let mut y = vec![0.0f32; rows * outputs];
                let project = Project {
                    x: &x,
                    inputs,
                    norm: None,
                    matrices: &[Matrix::Quantized(matrix)],
                    offsets: &[None],
                    gate: None,
                    post_norm: None,
                    residual: None,
                    scale: 1.0,
                    exact,
                };
                group.bench_function(BenchmarkId::new(name, rows), |b| {
                    b.iter(|| project.run(&mut [&mut y]));
                });
            }
        }
    }
}

criterion_group!(benches, quantized);
criterion_main!(benches);
