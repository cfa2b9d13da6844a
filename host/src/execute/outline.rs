//! From a recipe and a checkpoint to what has to be done, without reading a
//! tensor.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use weightmill_guest::abi::{PlanRequest, Tp};

use super::graph::{Source, Step, TargetId};
use crate::canonical::to_canonical;
use crate::checkpoint::{Checkpoint, SourceDigests};
use crate::digest::{ModuleDigest, RecordDigest};
use crate::error::{Code, Error, Result};
use crate::modules::Library;
use crate::plan::action::{self, Action, ModuleIdentity, SourceIdentity};
use crate::plan::{self, Body, CheckedPlan, Refusal};
use crate::recipe::{Application, Facts, Input, Origin, Recipe, Resolution, resolve};
use crate::sandbox::{Engine, Module, Program};
use crate::tensor::{TensorName, TensorType};

/// The tile size that modules are asked for, in bytes.
pub const TILE_BYTES: u64 = 1 << 20;

/// Remembers what plans say about dtypes and shapes between runs.
pub trait FactsCache: Sync {
    /// What is remembered.
    fn load(&self, key: &RecordDigest) -> Option<BTreeMap<String, TensorType>>;
    /// Remembers.
    fn save(&self, key: &RecordDigest, facts: &BTreeMap<String, TensorType>);
}

/// Remembers nothing.
pub struct NoFacts;

impl FactsCache for NoFacts {
    fn load(&self, _: &RecordDigest) -> Option<BTreeMap<String, TensorType>> {
        None
    }
    fn save(&self, _: &RecordDigest, _: &BTreeMap<String, TensorType>) {}
}

/// The engines of a session, made when they are first needed: a hit needs none.
///
/// Planning takes microseconds of work but would have to wait for native code
/// to be compiled, so plans may run on another engine than tiles: a plan is a
/// pure function of its request, whichever engine runs it.
pub struct Engines {
    tiles: Lazy,
    plans: Option<Lazy>,
    known: Mutex<BTreeMap<(ModuleDigest, Vec<u8>), CheckedPlan>>,
}

type MakeEngine = Box<dyn Fn() -> Result<Arc<dyn Engine>> + Send + Sync>;

struct Lazy {
    make: MakeEngine,
    engine: Mutex<Option<Arc<dyn Engine>>>,
    programs: Mutex<BTreeMap<ModuleDigest, Arc<dyn Program>>>,
}

impl Lazy {
    fn new(make: impl Fn() -> Result<Arc<dyn Engine>> + Send + Sync + 'static) -> Self {
        Lazy { make: Box::new(make), engine: Mutex::default(), programs: Mutex::default() }
    }

    fn engine(&self) -> Result<Arc<dyn Engine>> {
        let mut engine = self.engine.lock().unwrap_or_else(PoisonError::into_inner);
        match &*engine {
            Some(engine) => Ok(engine.clone()),
            None => Ok(engine.insert((self.make)()?).clone()),
        }
    }

    fn program(&self, module: &Module) -> Result<Arc<dyn Program>> {
        let mut programs = self.programs.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(program) = programs.get(&module.digest()) {
            return Ok(program.clone());
        }
        let program = self.engine()?.compile(module)?;
        programs.insert(module.digest(), program.clone());
        Ok(program)
    }
}

impl Engines {
    /// One engine for everything.
    pub fn one(make: impl Fn() -> Result<Arc<dyn Engine>> + Send + Sync + 'static) -> Self {
        Engines { tiles: Lazy::new(make), plans: None, known: Mutex::default() }
    }

    /// One engine for plans and another for tiles.
    pub fn two(
        plans: impl Fn() -> Result<Arc<dyn Engine>> + Send + Sync + 'static,
        tiles: impl Fn() -> Result<Arc<dyn Engine>> + Send + Sync + 'static,
    ) -> Self {
        Engines { plans: Some(Lazy::new(plans)), ..Engines::one(tiles) }
    }

    /// The module, compiled for tiles.
    ///
    /// # Errors
    /// A module code.
    pub fn program(&self, module: &Module) -> Result<Arc<dyn Program>> {
        self.tiles.program(module)
    }

    /// Asks a module for a plan, unless it has answered the same request.
    fn plan(&self, module: &Module, request: &PlanRequest, lens: &[u64]) -> Result<Result<CheckedPlan, Refusal>> {
        let id = (module.digest(), to_canonical(request)?);
        if let Some(plan) = self.known.lock().unwrap_or_else(PoisonError::into_inner).get(&id) {
            return Ok(Ok(plan.clone()));
        }
        let program = self.plans.as_ref().unwrap_or(&self.tiles).program(module)?;
        let answer = plan::ask(program.as_ref(), request, lens)?;
        if let Ok(plan) = &answer {
            self.known.lock().unwrap_or_else(PoisonError::into_inner).insert(id, plan.clone());
        }
        Ok(answer)
    }
}

/// What an outline is made from.
pub struct Inputs<'a> {
    /// The recipe.
    pub recipe: &'a Recipe,
    /// The checkpoint.
    pub checkpoint: Arc<Checkpoint>,
    /// Tensor parallel size and rank.
    pub tp: Tp,
    /// Where modules come from.
    pub modules: &'a Library,
    /// What runs them.
    pub engine: &'a Engines,
    /// What is known of earlier plans.
    pub facts: &'a dyn FactsCache,
    /// The tile size that modules are asked for.
    pub tile_bytes: u64,
}

/// A resolved recipe with its modules.
pub struct Outline<'a> {
    inputs: Inputs<'a>,
    /// What the recipe makes of the checkpoint's names.
    pub resolution: Resolution,
    /// One for each application.
    pub modules: Vec<Arc<Module>>,
}

impl<'a> Outline<'a> {
    /// Resolves the recipe. Runs a plan only where a later step's `where` asks
    /// for a dtype that is not known yet.
    ///
    /// # Errors
    /// What is wrong with the recipe, or a module.
    pub fn new(inputs: Inputs<'a>) -> Result<Self> {
        let Tp { rank, size } = inputs.tp;
        if size == 0 || rank >= size {
            return Err(Error::new(
                Code::BadParams,
                format!("tensor parallel rank {rank} of size {size} does not exist"),
            )
            .hint("ranks count from 0: 0 ≤ --tp-rank < --tp-size"));
        }
        let sources: BTreeMap<TensorName, TensorType> =
            inputs.checkpoint.tensors().iter().map(|(name, t)| (name.clone(), t.tensor.clone())).collect();
        let folder = folder_of(inputs.recipe.file());
        for step in inputs.recipe.steps() {
            inputs.modules.load(step.module(), folder).map_err(|e| e.at(step.module_at().clone()))?;
        }
        let mut asked = AskedFacts { inputs: &inputs, sources: &sources, known: Vec::new() };
        let resolution = resolve(inputs.recipe, &sources, inputs.checkpoint.config(), &mut asked)?;
        let modules = resolution.applications.iter().map(|a| inputs.modules.load(&a.module, folder));
        let modules = modules.collect::<Result<_>>()?;
        Ok(Outline { inputs, resolution, modules })
    }

    /// The recipe.
    pub fn recipe(&self) -> &Recipe {
        self.inputs.recipe
    }

    /// The checkpoint.
    pub fn checkpoint(&self) -> &Arc<Checkpoint> {
        &self.inputs.checkpoint
    }

    /// Tensor parallel size and rank.
    pub fn tp(&self) -> Tp {
        self.inputs.tp
    }

    fn identity(&self, application: usize) -> ModuleIdentity {
        identity(&self.modules[application])
    }

    /// The action, from the sources' digests.
    ///
    /// # Errors
    /// `bad_params`, `checkpoint_invalid`.
    pub fn action(&self, digests: &SourceDigests) -> Result<Action> {
        let sources = self.inputs.checkpoint.tensors().iter().filter_map(|(name, source)| {
            let digest = *digests.by_name.get(name)?;
            Some((name.clone(), SourceIdentity { tensor: source.tensor.clone(), digest }))
        });
        let modules: Vec<_> = (0..self.modules.len()).map(|i| self.identity(i)).collect();
        action::build(&self.resolution, &modules, &sources.collect(), self.inputs.tp, "")
    }

    /// Plans every application that a final tensor comes from, and checks the
    /// plans. Applications that nothing needs get an empty step.
    ///
    /// # Errors
    /// `bad_params`, `module_rejected_input`, or a module code, with the place
    /// in the recipe.
    pub fn steps(&self) -> Result<Vec<Step>> {
        let needed = action::reachable(&self.resolution, self.resolution.tensors.values());
        let mut steps: Vec<Step> = Vec::new();
        for (index, application) in self.resolution.applications.iter().enumerate() {
            // A step that nothing needs is planned all the same: its errors are the recipe's.
            let located =
                application.inputs.iter().map(|input| self.locate(input, &steps)).collect::<Result<Vec<_>>>()?;
            let types: Vec<plan::Input<'_>> = application
                .inputs
                .iter()
                .zip(&located)
                .map(|(input, (_, tensor))| (input.role.as_str(), input.index, tensor))
                .collect();
            let module = &self.modules[index];
            let plan = plan_application(&self.inputs, application, module, &types)?;
            let computes = plan.targets.iter().any(|t| matches!(t.body, Body::Tiles(_)));
            let program =
                if computes && needed.contains(&index) { Some(self.inputs.engine.program(module)?) } else { None };
            steps.push(Step {
                plan,
                program,
                inputs: located.into_iter().map(|(source, _)| source).collect(),
                params: to_canonical(&application.params)?,
                module: module.metadata().name.clone(),
                names: application.outputs.iter().map(|o| (o.role.clone(), o.name.clone())).collect(),
            });
        }
        Ok(steps)
    }

    fn locate(&self, input: &Input, steps: &[Step]) -> Result<(Source, TensorType)> {
        match &input.origin {
            Origin::Source(name) => {
                let source =
                    self.inputs.checkpoint.tensors().get(name).ok_or_else(|| {
                        Error::new(Code::MissingInput, format!("the checkpoint has no tensor {name}"))
                    })?;
                let len = source.tensor.len_bytes();
                Ok((Source::File { file: source.file, offset: source.offset, len }, source.tensor.clone()))
            }
            Origin::Output { application, role } => {
                let plan = &steps[*application].plan;
                let target = plan
                    .output(role)
                    .ok_or_else(|| Error::new(Code::ModuleBadPlan, format!("the plan has no output '{role}'")))?;
                let id = TargetId { application: *application, target };
                Ok((Source::Target(id), plan.targets[target].tensor.clone()))
            }
        }
    }
}

fn identity(module: &Module) -> ModuleIdentity {
    ModuleIdentity { digest: module.digest(), uses_tp: module.metadata().uses_tp }
}

fn output_roles(application: &Application) -> Vec<String> {
    application.outputs.iter().map(|o| o.role.clone()).collect()
}

fn plan_application(
    inputs: &Inputs<'_>,
    application: &Application,
    module: &Arc<Module>,
    types: &[plan::Input<'_>],
) -> Result<CheckedPlan> {
    let tp = action::effective_tp(application, identity(module), inputs.tp);
    let request = plan::request(&application.params, types, output_roles(application), tp, inputs.tile_bytes)?;
    let lens: Vec<u64> = types.iter().map(|(_, _, tensor)| tensor.len_bytes()).collect();
    let name = &module.metadata().name;
    let about = || match application.inputs.first() {
        Some(input) => format!("{name} of {}", input.name),
        None => name.clone(),
    };
    let planned =
        inputs.engine.plan(module, &request, &lens).map_err(|e| e.context(about()).at(application.at.clone()))?;
    planned.map_err(|Refusal { param, role, error }| {
        let subject = role.as_deref().and_then(|role| application.inputs.iter().find(|i| i.role == role));
        let at = match (&param, &role) {
            (Some(param), _) => inputs.recipe.param_location(application.step, param),
            (None, Some(role)) => inputs.recipe.input_location(application.step, role),
            (None, None) => application.at.clone(),
        };
        let error = match subject {
            Some(input) => error.context(format!("{name} of {}", input.name)),
            None => error.context(about()),
        };
        error.at(at)
    })
}

/// Answers a recipe's questions about what earlier applications make.
struct AskedFacts<'a, 'b> {
    inputs: &'b Inputs<'a>,
    sources: &'b BTreeMap<TensorName, TensorType>,
    /// By application.
    known: Vec<Option<BTreeMap<String, TensorType>>>,
}

impl Facts for AskedFacts<'_, '_> {
    fn outputs(&mut self, application: &Application, so_far: &Resolution) -> Result<BTreeMap<String, TensorType>> {
        let mut tensors = Vec::new();
        for input in &application.inputs {
            tensors.push(match &input.origin {
                Origin::Source(name) => self.sources.get(name).cloned(),
                Origin::Output { application, role } => self.earlier(*application, so_far)?.get(role).cloned(),
            });
        }
        let types: Option<Vec<plan::Input<'_>>> = application
            .inputs
            .iter()
            .zip(&tensors)
            .map(|(input, tensor)| Some((input.role.as_str(), input.index, tensor.as_ref()?)))
            .collect();
        let types = types.ok_or_else(|| {
            Error::new(Code::MissingInput, "an application's input has no known dtype and shape")
                .at(application.at.clone())
        })?;
        let module = self.inputs.modules.load(&application.module, folder_of(self.inputs.recipe.file()))?;
        let tp = action::effective_tp(application, identity(&module), self.inputs.tp);
        let outputs = output_roles(application);
        let key = action::facts_key(identity(&module), &application.params, tp, &types, &outputs)?;
        match self.inputs.facts.load(&key) {
            Some(facts) if outputs.iter().all(|role| facts.contains_key(role)) => Ok(facts),
            _ => {
                let facts = plan_application(self.inputs, application, &module, &types)?.facts();
                self.inputs.facts.save(&key, &facts);
                Ok(facts)
            }
        }
    }
}

impl AskedFacts<'_, '_> {
    fn earlier(&mut self, index: usize, so_far: &Resolution) -> Result<BTreeMap<String, TensorType>> {
        self.known.resize(so_far.applications.len().max(self.known.len()), None);
        if let Some(facts) = &self.known[index] {
            return Ok(facts.clone());
        }
        let facts = self.outputs(&so_far.applications[index], so_far)?;
        self.known[index] = Some(facts.clone());
        Ok(facts)
    }
}

/// The folder that a recipe's paths are relative to.
pub fn folder_of(file: &Path) -> &Path {
    match file.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}
