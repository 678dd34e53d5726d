# GNU make 3.81 or newer (what macOS ships). `make` alone lists the targets.

CARGO   ?= cargo
PYTHON  ?= python3
PREFIX  ?= /usr/local
DESTDIR ?=

# For `make run`; ARGS also for `make bench`.
PLUGIN ?= qwen_mtp
PROMPT ?= Explain what a computer program is.
ARGS   ?=
# Reaches the recipe through the environment, so that quotes in it do no harm.
export PROMPT

PLUGINS := deepspec dflash gemma_assistant ngram qwen_mtp
PLUGIN_PACKAGES := $(PLUGINS:%=-p %)
ifeq ($(shell uname -s),Darwin)
SO := dylib
else
SO := so
endif

BIN      := $(DESTDIR)$(PREFIX)/bin
LIB      := $(DESTDIR)$(PREFIX)/lib/mlxhost
MODELS   := $(DESTDIR)$(PREFIX)/share/mlxhost/models
TARGET   := smollm2-135m-instruct
DRAFTERS := smollm2-mtp/bf16 smollm2-mtp/4bit smollm2-dflash/4bit

.PHONY: help build model run test lint bench bench-batch bench-plugins bench-peers bench-kernels bench-instructions install clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-18s %s\n", $$1, $$2}' Makefile
	@echo
	@echo '  make run PROMPT="..." PLUGIN=ngram ARGS="--temperature 0.7"'
	@echo '  make install PREFIX=/usr/local DESTDIR='

build: ## the program in target/release, the plugins in plugins/
	$(CARGO) build --release -p mlxhost
	$(CARGO) build --profile plugin $(PLUGIN_PACKAGES)
	@# Renamed into place: whoever reads the old file keeps it whole.
	@for name in $(PLUGINS); do \
	  cp target/plugin/lib$$name.$(SO) plugins/.$$name.$(SO) && \
	  mv -f plugins/.$$name.$(SO) plugins/$$name.$(SO) || exit 1; \
	done

model: ## fetch the demo model once (93 MB)
	@$(PYTHON) models/fetch.py

run: model build ## answer PROMPT with the demo model and drafter
	target/release/mlxhost --plugin plugins/$(PLUGIN).$(SO) --prompt "$$PROMPT" --depth 3 --stats $(ARGS)

test: model ## all tests
	$(CARGO) build --workspace
	MLXHOST_TESTS_BUILT=1 $(CARGO) test --workspace

lint: ## formatting, clippy, rustdoc; and that no plugin reaches MLX
	$(CARGO) fmt --check
	$(CARGO) fmt --check --manifest-path mlx-sys/Cargo.toml
	@tree=$$($(CARGO) tree $(PLUGIN_PACKAGES) -e normal) || exit 1; \
	if printf '%s\n' "$$tree" | grep -E 'mlx-(sys|rs)'; then \
	  echo 'a plugin depends on MLX' >&2; exit 1; \
	fi
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	$(CARGO) clippy -p mlx-sys --all-targets -- -D warnings
	RUSTDOCFLAGS='-D warnings' $(CARGO) doc -p mlxhost-plugin-api --no-deps

bench: model build ## compare with other engines, and drafters with none; ARGS=--quick for a first look
	$(PYTHON) bench/bench.py $(ARGS)

bench-batch: model build ## many requests at a time, with drafters and without
	$(PYTHON) bench/batch.py $(ARGS)

bench-plugins: build ## what plugins at hand add to the start of the program
	$(PYTHON) bench/plugins.py $(ARGS)

bench-peers: ## install the other engines for `make bench` (compiles llama.cpp)
	$(PYTHON) -m venv bench/.venv
	CMAKE_ARGS="-DGGML_NATIVE=ON $$CMAKE_ARGS" bench/.venv/bin/pip install -r bench/requirements.txt

bench-kernels: ## what the plugin boundary costs
	$(CARGO) build --release -p qwen_mtp
	MLXHOST_TESTS_BUILT=1 $(CARGO) bench -p mlxhost-tests

bench-instructions: model build ## instructions per token against the kept counts (needs valgrind)
	$(PYTHON) bench/instructions.py $(ARGS)

install: model build ## program, plugins, libmlx and demo model below PREFIX
	@# Cargo tells where libmlx lies: .../mlx/lib, on Linux with .../*.libs beside .../mlx.
	@mlx=$$($(CARGO) build --release -p mlxhost --message-format=json 2>/dev/null \
	  | grep -o '"native=[^"]*/mlx/lib"' | head -n 1 | sed 's/^"native=//; s/"$$//'); \
	if [ ! -d "$$mlx" ]; then echo 'libmlx was not found' >&2; exit 1; fi; \
	set -e; \
	install -d "$(BIN)" "$(LIB)/plugins" "$(MODELS)/$(TARGET)"; \
	install -m 755 target/release/mlxhost "$(BIN)/mlxhost"; \
	for name in $(PLUGINS); do \
	  install -m 755 plugins/$$name.$(SO) "$(LIB)/plugins/$$name.$(SO)"; \
	done; \
	rm -rf "$(LIB)/mlx" "$(LIB)"/*.libs; install -d "$(LIB)/mlx"; \
	cp -R "$$mlx" "$(LIB)/mlx/"; \
	for libs in "$$mlx"/../../*.libs; do \
	  if [ -d "$$libs" ]; then cp -R "$$libs" "$(LIB)/"; fi; \
	done; \
	for file in models/$(TARGET)/*.gguf models/$(TARGET)/LICENSE.txt; do \
	  install -m 644 "$$file" "$(MODELS)/$(TARGET)/"; \
	done; \
	for dir in $(DRAFTERS); do \
	  to="$(MODELS)/$$dir"; \
	  install -d "$$to"; \
	  install -m 644 models/$$dir/*.json* models/$$dir/*.safetensors "$$to/"; \
	  install -m 644 models/$$dir/../LICENSE models/$$dir/../NOTICE "$$to/../"; \
	done
	@echo 'Installed. The plugins in $(PREFIX)/lib/mlxhost/plugins are found by themselves.'

clean: ## remove what was built (not the fetched model, nor the MLX cache)
	$(CARGO) clean
	rm -f plugins/*.so plugins/*.dylib
