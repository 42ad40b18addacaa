# Everything runs in one virtual environment, made on first use and reused while pyproject.toml, constraints.txt and
# scripts/setup.sh stand.
VENV ?= .venv
export VENV
# Processes that start often read compiled modules, which the first one writes.
unexport PYTHONDONTWRITEBYTECODE
BIN := $(VENV)/bin
# Three processes with one thread each keep two cores busy: many tests wait for processes that they start. Each takes 1
# to 2 GB. Files go to them in the order of tests/conftest.py, not of how many tests they have: long ones first, those of
# tests/unit, all short, last.
WORKERS ?= 3
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -p no:benchmark -n $(WORKERS) --dist loadfile --no-loadscope-reorder
GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
# $(call tests,and EXPRESSION) runs the tests that a marker expression selects. Where there is a GPU, those that use it
# run one after the other, for an engine takes most of its memory, and all others as if there were none.
ifeq ($(GPU),yes)
tests = { CUDA_VISIBLE_DEVICES= $(PYTEST) -m "not gpu and not engines $(1)"; rest=$$?; \
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "(gpu or engines) $(1)" && exit $$rest; }
else
tests = $(PYTEST) -m "not gpu $(1)"
endif
# Looked for when a target runs: setting it up may install one.
BROWSER = $(shell command -v chromium || command -v chromium-browser || command -v google-chrome)
PAGE = $(if $(BROWSER),,and not browser)
SAY_BROWSER = @$(if $(BROWSER),:,echo "Tests of the page are left out: no chromium or Chrome is found.")

.PHONY: help demo demo-words demo-agent demo-sft demo-dpo demo-kto demo-kd demo-pipeline demo-shapes demo-streak demo-cluster test test-all check lint ci bench clean

help:
	@echo "make demo          train a small model on sums, and show the result"
	@echo "make demo-words    train it on word problems in GSM8K's form"
	@echo "make demo-agent    train it on products, with a Python sandbox as its tool"
	@echo "make demo-sft      fine-tune it on solved word problems"
	@echo "make demo-dpo      teach it a preference for short calculations, by DPO"
	@echo "make demo-kto      teach it the same from single replies, good and bad, by KTO"
	@echo "make demo-kd       distil the fine-tuned model into the one it began as"
	@echo "make demo-shapes   a tiny model of random weights that learns to name shapes in images"
	@echo "make demo-streak   the same in several turns: it is shown another image as long as it is right"
	@echo "make demo-pipeline fine-tuning, a reward model, and PPO with it, on sums"
	@echo "make demo-cluster  the first again in several processes: Ray, vLLM and DeepSpeed"
	@echo "make check         linters and the fast tests"
	@echo "make test          all tests but those of demos, benchmarks, deaths of processes, and more sizes of the same"
	@echo "make test-all      all tests that this machine can run"
	@echo "make ci            linters and all tests but more sizes of the same"
	@echo "make lint          format, lint rules, types and layers"
	@echo "make bench         benchmarks"
	@echo "make clean         remove caches and build products"

demo: $(VENV)/.demo-stamp
	@$(BIN)/python examples/sums.py

demo-words: $(VENV)/.demo-stamp
	@$(BIN)/python examples/word_problems.py

demo-agent: $(VENV)/.demo-stamp
	@$(BIN)/python examples/products.py

demo-sft demo-dpo demo-kto demo-kd demo-pipeline demo-shapes demo-streak: demo-%: $(VENV)/.demo-stamp
	@$(BIN)/python examples/$*.py

demo-cluster: $(VENV)/.cluster-stamp
	@$(BIN)/python examples/sums_cluster.py

test: $(VENV)/.test-stamp
	$(SAY_BROWSER)
	$(call tests,and not chaos and not demo and not wide $(PAGE))

# The cache keeps failures of tests that are no more, and of runs of a few: they are not to be tried again.
test-all: $(VENV)/.test-stamp
	$(SAY_BROWSER)
	@rm -f .pytest_cache/v/cache/lastfailed
	($(call tests,$(WITHOUT) $(PAGE))) || { [ $$? -eq 1 ] && $(BIN)/python scripts/failed_again.py; }

check: lint
	$(SAY_BROWSER)
	$(call tests,and not slow and not chaos $(PAGE))

lint: $(VENV)/.test-stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# Linters run beside the first tests, most of which wait for processes of theirs.
ci: $(VENV)/.test-stamp
	@$(MAKE) --no-print-directory -j2 lint test-all WITHOUT="and not wide"

bench: $(VENV)/.bench-stamp
	$(BIN)/pytest benchmarks --benchmark-only

clean:
	rm -rf build dist *.egg-info .benchmarks .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

$(VENV)/.%-stamp: pyproject.toml constraints.txt scripts/setup.sh
	@scripts/setup.sh $*

$(VENV)/.cluster-stamp: $(VENV)/.demo-stamp
$(VENV)/.test-stamp: $(VENV)/.cluster-stamp $(wildcard tests/*.txt)
$(VENV)/.bench-stamp: $(VENV)/.test-stamp
