# Penstock. `make help` lists the targets. Everything that is made lies under $(BUILD).
#   CC, CFLAGS, CPPFLAGS, LDFLAGS, LDLIBS   yours; the project's own flags are added in front
#   BUILD   where objects, library, binary and environment go (default: build)
#   VENV    the Python environment (default: $(BUILD)/venv)       PYTHON  the interpreter it is made from
#   VENV_TEST  the environment of the tests and their references (default: $(VENV)-test), apart from what was built against $(VENV)
#   BLAS    wheel (OpenBLAS from the pinned wheel, default) or system (pkg-config openblas)
#   BLAS_PYTHON  the interpreter that has that wheel (default: that of $(VENV), which is made when missing)
#   CUDA    auto (where nvcc is found, default) | 1 | 0      CUDA_HOME  the toolkit, 12.4 or newer (default: that of nvcc)
#   CUDA_ARCH  compute capabilities as "80 86 89 90 100 120" or all (default: of the GPUs here, else 80, which
#           newer GPUs translate at first use)      ARCHS  those of cuda-archs (default: 89 120)
#   CUBLAS_PYTHON  the interpreter that has NVIDIA's cuBLAS wheel, where the toolkit comes without cuBLAS (default: that of $(VENV),
#           which gets it)
#   CUDNN   1 (with CUDA, default) | 0: build without attention on GPUs      CXX, CXXFLAGS  its C++ compiler and flags (default: -O1)
#   CUDNN_PYTHON  the interpreter that has the wheels of python/requirements-cudnn*.txt (default: that of $(VENV), which gets them)
#   CUDNN_HOME  a cuDNN by itself, its include/ and lib/      CUDNN_FRONTEND  the folder that has cudnn_frontend.h, where no wheel has it
#   FLASH_ATTN  auto (for the GPUs here: 4 on 9.0, 1 on 8.x and 12.x, else none; default) | 0: none
#           | 1: fetch flash-attn's source and compile its kernels: attention for GPUs before 9.0 (minutes, 6 GB a job)
#           | 4: fetch flash-attn-4 and NVIDIA's compiler for it: faster attention for GPUs of 9.0 (2 minutes; CUDA 12.8 or newer, x86-64)
#           | "1 4": both
#   NVCCFLAGS  yours, added behind the project's own
#   V       0: a short line a file (default) | 1: the commands
#   SAN     thread | address,undefined: build with sanitizers and asserts (use another BUILD)
#   DEBUG   0 (default): without asserts | 1: with asserts, -O0 -g unless you give CFLAGS (use another BUILD)
# What was built with other settings in the same BUILD is built again.
BUILD ?= build
VENV ?= $(BUILD)/venv
VENV_TEST ?= $(VENV)-test
PYTHON ?= python3
BLAS ?= wheel
CUDA ?= auto
CUDNN ?= 1
FLASH_ATTN ?= auto
V ?= 0
DEBUG ?= 0
CFLAGS ?= $(if $(filter 1,$(DEBUG)),-O0 -g,-O2 -g)
CXXFLAGS ?= -O1

NVCC := $(firstword $(if $(CUDA_HOME),$(wildcard $(CUDA_HOME)/bin/nvcc),$(realpath $(shell command -v nvcc)) $(wildcard /usr/local/cuda/bin/nvcc)))
# A demo where nvcc is found and no GPU is built for the CPU, beside what make builds with CUDA, which stays as it is.
ifeq ($(filter-out demo demo-chat,$(or $(MAKECMDGOALS),all))$(CUDA),auto)
ifeq ($(wildcard $(BUILD)/lib/libpenstock.so)$(shell nvidia-smi -L 2>/dev/null | grep '^GPU'),)
ifneq ($(NVCC),)
$(info no GPU here: the demo is built for the CPU in $(BUILD)/cpu, without NVIDIA's libraries (CUDA=1: with them))
override VENV := $(VENV)
override BUILD := $(BUILD)/cpu
override CUDA := 0
endif
endif
endif

# The folder of the checkout may have spaces in its path: nothing here needs it.
$(foreach v,BUILD VENV VENV_TEST CUDA_HOME,$(if $(word 2,$($v)),$(error $v="$($v)" has a space in it, which make cannot handle: choose another $v)))

ifneq ($(filter default undefined,$(origin CC)),)
CC := $(shell command -v cc || command -v gcc || command -v clang || echo cc)
endif

ifneq ($(filter default undefined,$(origin CXX)),)
CXX := $(shell command -v c++ || command -v g++ || command -v clang++ || echo c++)
endif

# $(call run,WHAT,FILE) in front of a command prints a short line in its place, or with V=1 the command.
quiet := $(findstring s,$(firstword -$(MAKEFLAGS)))
run = $(if $(filter 1,$(V)),,@$(if $(quiet),,printf '  %-5s %s\n' $1 '$2';) )

PS_CPPFLAGS := -Iinclude -Inative -D_GNU_SOURCE
PS_CFLAGS := -std=gnu11 -fPIC -fvisibility=hidden -ffp-contract=off -fno-math-errno -pthread -Wall -Wextra -Wno-unused-parameter
PS_CXXFLAGS := -std=c++17 -fPIC -fvisibility=hidden -pthread -Wall -Wextra -Wno-unused-parameter
PS_LDFLAGS := -pthread
PS_LDLIBS := -lm -ldl
ifneq ($(SAN),)
PS_CFLAGS += -fsanitize=$(SAN) -fno-omit-frame-pointer -DPS_SANITIZED=1
PS_LDFLAGS += -fsanitize=$(SAN)
else ifneq ($(DEBUG),1)
PS_CPPFLAGS += -DNDEBUG
PS_CFLAGS += -Wframe-larger-than=40960
endif

# OpenBLAS is opened at run time (kernels/cpu/matmul.c); only the benchmark that compares with its threads links it.
ifeq ($(BLAS),wheel)
BLAS_STAMP := $(BUILD)/lib/libscipy_openblas.so
PS_CPPFLAGS += -I$(BUILD)/blas -DPS_BLAS_WHEEL=1
BENCH_LDLIBS := -L$(BUILD)/lib -lscipy_openblas
else
BLAS_STAMP := $(BUILD)/.done-cblas
PS_CPPFLAGS += $(shell pkg-config --cflags openblas 2>/dev/null)
BENCH_LDLIBS := $(shell pkg-config --libs openblas 2>/dev/null || echo -lopenblas)
endif

LIB_SRC := $(sort $(wildcard native/core/*.c native/engine/*.c native/backends/*/*.c native/kernels/*.c native/kernels/cpu/*.c native/optim/*.c \
             native/model/*.c native/model/families/*.c native/hardware/*.c native/step/*.c native/plan/*.c native/generate/*.c native/train/*.c native/io/*.c native/hosts/*.c) native/kernels/cuda/gemm_cache.c)

# CUDA. The driver and cuBLASLt are opened at run time, so that what is built here also loads on machines without a GPU.
ifeq ($(CUDA),auto)
override CUDA := $(if $(NVCC),1,0)
endif
ifeq ($(CUDA),1)
ifeq ($(NVCC),)
$(error CUDA=1, but there is no nvcc: install the CUDA toolkit (12.4 or newer), or set CUDA_HOME to where it is)
endif
CUDA_TOOLKIT := $(realpath $(shell $(NVCC) --dryrun -x cu /dev/null 2>&1 | sed -n 's/^.. TOP=//p'))
CUDA_MAJOR := $(shell $(NVCC) --version | sed -n 's/.*release \([0-9]*\)\..*/\1/p')
CUDA_KNOWN := $(patsubst compute_%,%,$(shell $(NVCC) --list-gpu-arch))
CUDA_HERE := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | tr -dc '0-9\n' | sort -un)
ifeq ($(origin CUDA_ARCH),undefined)
CUDA_ARCH := $(or $(CUDA_HERE),80)
CUDA_ARCH_NOTE := $(if $(CUDA_HERE),,no GPU here: building for compute capability 8.0, which newer GPUs translate at first use (CUDA_ARCH="90 120" or CUDA_ARCH=all: for others; CUDA=0: for the CPU alone))
endif
ifeq ($(CUDA_ARCH),all)
override CUDA_ARCH := $(filter $(CUDA_KNOWN),80 86 89 90 100 120)
endif
CUDA_LIB := $(firstword $(wildcard $(CUDA_TOOLKIT)/lib64 $(CUDA_TOOLKIT)/targets/x86_64-linux/lib $(CUDA_TOOLKIT)/lib))
GENCODE := $(foreach a,$(CUDA_ARCH),-gencode arch=compute_$(a),code=sm_$(a)) \
           $(foreach a,$(lastword $(CUDA_ARCH)),-gencode arch=compute_$(a),code=compute_$(a))
PS_CPPFLAGS += -DPS_CUDA=1 -DPS_CUDA_ARCH='"$(strip $(CUDA_ARCH))"' -isystem $(CUDA_TOOLKIT)/include
PS_NVCCFLAGS := -std=c++17 -O3 -lineinfo -Iinclude -Inative -DPS_CUDA=1 -D_GNU_SOURCE -Xcompiler -fPIC,-fvisibility=hidden,-Wall $(GENCODE)
PS_LDLIBS += -L$(CUDA_LIB) -lcudart_static -lrt -lpthread -lstdc++
# cuBLASLt's header from the toolkit or from the wheel; its library beside ours, where our rpath finds it.
ifneq ($(wildcard $(CUDA_TOOLKIT)/include/cublasLt.h),)
CUBLAS_STAMP :=
else
CUBLAS_STAMP := $(BUILD)/cublas/cublasLt.h
PS_CPPFLAGS += -isystem $(BUILD)/cublas
PS_NVCCFLAGS += -isystem $(BUILD)/cublas
endif
CU_SRC := $(sort $(wildcard native/kernels/cuda/*.cu native/optim/cuda/*.cu))
# The attention library for the GPUs here, of those that this toolkit, processor and CUDA_ARCH allow.
ifeq ($(FLASH_ATTN),auto)
FLASH_ATTN_HERE := $(filter $(CUDA_ARCH),$(CUDA_HERE))
override FLASH_ATTN := $(if $(filter 80 86 87 89 12%,$(FLASH_ATTN_HERE)),1)
ifneq ($(and $(filter 90,$(FLASH_ATTN_HERE)),$(filter x86_64,$(shell uname -m)),\
         $(shell grep -l cudaLibraryLoadData $(CUDA_TOOLKIT)/include/cuda_runtime_api.h 2>/dev/null)),)
override FLASH_ATTN += 4
endif
override FLASH_ATTN := $(or $(strip $(FLASH_ATTN)),0)
FLASH_ATTN_NOTE := $(if $(FLASH_ATTN_HERE),attention for the GPU here (compute capability $(FLASH_ATTN_HERE)): FLASH_ATTN="$(FLASH_ATTN)"; another value chooses another library)
endif
ifneq ($(filter-out 0 1 4,$(FLASH_ATTN)),)
$(error FLASH_ATTN="$(FLASH_ATTN)": it is auto, 0, 1, 4 or "1 4")
endif
FLASH_ATTN_1 := $(filter 1,$(FLASH_ATTN))
FLASH_ATTN_4 := $(filter 4,$(FLASH_ATTN))
CU_SRC := $(filter-out $(if $(FLASH_ATTN_1),,%/attention_flash.cu) $(if $(FLASH_ATTN_4),,%/attention_flash4.cu),$(CU_SRC))
# An installed package lies beside NVIDIA's wheels: site-packages/penstock/_native and site-packages/nvidia.
NVIDIA_WHEELS := :$$ORIGIN/../../nvidia/cu$(CUDA_MAJOR)/lib:$$ORIGIN/../../nvidia/cublas/lib:$$ORIGIN/../../nvidia/cudnn/lib:$$ORIGIN/../../nvidia/nccl/lib
CU_OBJ := $(CU_SRC:%.cu=$(BUILD)/obj/%.o)
# Objects of cuda-archs, which nothing links: a library of all of them would be three times as large.
ARCHS ?= 89 120
# Attention libraries have flags of their own, and are for one kind of GPU.
ARCHS_OBJ := $(patsubst %.cu,$(BUILD)/archs/%.o,$(filter-out %/attention_flash.cu %/attention_flash4.cu,$(CU_SRC)))
ARCHS_NVCCFLAGS = $(subst $(GENCODE),$(foreach a,$(ARCHS),-gencode arch=compute_$(a),code=sm_$(a)),$(PS_NVCCFLAGS))
# Attention through cuDNN: headers under $(BUILD)/cudnn/include (the frontend counts on that name), its libraries, which are opened at run time, beside ours.
ifeq ($(CUDNN),1)
CUDNN_STAMP := $(BUILD)/cudnn/include/cudnn_frontend.h
PS_CPPFLAGS += -DPS_CUDNN=1
PS_NVCCFLAGS += -DPS_CUDNN=1
CU_OBJ += $(BUILD)/obj/native/kernels/cuda/attention_cudnn.o
endif
# flash-attn's kernels, one object for each direction and head dim.
ifneq ($(FLASH_ATTN_1),)
FLASH_STAMP := $(BUILD)/flash-attn/LICENSE
FLASH_FLAGS := -Inative/kernels/cuda/flash/standin -isystem $(BUILD)/flash-attn/src -isystem $(BUILD)/flash-attn/cutlass \
               --expt-relaxed-constexpr --expt-extended-lambda --use_fast_math
PS_NVCCFLAGS += -DPS_FLASH_ATTN=1
FLASH_OBJ := $(foreach k,fwd_64 fwd_128 bwd_64 bwd_128,$(BUILD)/obj/native/kernels/cuda/flash/$(k).o)
CU_OBJ += $(FLASH_OBJ)
endif
# flash-attn-4's, a static library with its runtime, which cudart_static (behind it) completes.
ifneq ($(FLASH_ATTN_4),)
ifeq ($(filter 90,$(CUDA_ARCH)),)
$(error FLASH_ATTN=4 is for GPUs of compute capability 9.0, which CUDA_ARCH="$(strip $(CUDA_ARCH))" leaves out)
endif
ifeq ($(shell grep -l cudaLibraryLoadData $(CUDA_TOOLKIT)/include/cuda_runtime_api.h 2>/dev/null),)
$(error FLASH_ATTN=4 needs a CUDA toolkit of 12.8 or newer: $(CUDA_TOOLKIT) is older)
endif
FLASH4 := $(BUILD)/flash4
PS_NVCCFLAGS += -DPS_FLASH4=1
FLASH4_LIBS := $(FLASH4)/libflash4.a $(FLASH4)/libcuda_dialect_runtime_static.a
PS_LDLIBS := -Wl,--exclude-libs,libflash4.a:libcuda_dialect_runtime_static.a $(FLASH4_LIBS) $(PS_LDLIBS)
endif
LIB_SRC := $(sort $(LIB_SRC) $(wildcard native/kernels/cuda/*.c))
else
ifneq ($(filter-out auto 0,$(FLASH_ATTN)),)
$(error FLASH_ATTN=$(FLASH_ATTN) is attention on GPUs, and this is a build without CUDA: install the CUDA toolkit, or leave FLASH_ATTN out)
endif
LIB_SRC := $(filter-out native/backends/cuda/%,$(LIB_SRC))
endif
CLI_SRC := $(sort $(wildcard native/cli/*.c))
TEST_SRC := $(sort $(wildcard tests/native/test_*.c)) tests/native/golden.c
BENCH_SRC := $(filter-out bench/gpus_flows.c,$(sort $(wildcard bench/*.c)))
LIB_OBJ := $(LIB_SRC:%.c=$(BUILD)/obj/%.o) $(CU_OBJ)
CLI_OBJ := $(CLI_SRC:%.c=$(BUILD)/obj/%.o)
TEST_BIN := $(TEST_SRC:tests/native/%.c=$(BUILD)/tests/%)
FUZZ_BIN := $(patsubst tests/fuzz/%.c,$(BUILD)/fuzz/%,$(sort $(wildcard tests/fuzz/fuzz_*.c)))
OP_CASES := $(addprefix tests/native/,op_cases.c op_cases_layers.c op_cases_products.c op_cases_fp8.c)
DRAW_SETS := $(patsubst %,$(BUILD)/obj/tests/native/draw_set_%.o,sse2 avx2 avx512f)
AVX2_LIB := $(BUILD)/tests/avx2/lib/libpenstock.so
BENCH_BIN := $(BENCH_SRC:bench/%.c=$(BUILD)/bench/%)
LIB := $(BUILD)/lib/libpenstock.so
CDEF := $(BUILD)/lib/penstock.cdef
ARCHIVE := $(BUILD)/lib/libpenstock.a
BIN := $(BUILD)/bin/penstock

# What was built with which command: each compiler and the linker has a stamp with the sum of its command in its name. Another command is
# another stamp, which takes the place of the old one and is newer than what that command made.
CONFIG_c := $(CC) $(PS_CPPFLAGS) $(CPPFLAGS) $(PS_CFLAGS) $(CFLAGS)
CONFIG_cxx := $(CXX) $(PS_CPPFLAGS) $(CPPFLAGS) $(PS_CXXFLAGS) $(CXXFLAGS)
CONFIG_cu := $(NVCC) $(PS_NVCCFLAGS) $(FLASH_FLAGS) $(NVCCFLAGS)
CONFIG_link := $(CC) $(PS_LDFLAGS) $(LDFLAGS) $(PS_LDLIBS) $(LDLIBS) $(LIB_OBJ)
QUOTE := '
stamp = $(BUILD)/obj/.config-$1.$(firstword $(shell printf '%s' '$(subst $(QUOTE),$(QUOTE)\$(QUOTE)$(QUOTE),$(CONFIG_$1))' | cksum))
STAMP_c := $(call stamp,c)
STAMP_cxx := $(call stamp,cxx)
STAMP_cu := $(call stamp,cu)
STAMP_link := $(call stamp,link)

# Links beside our library to others that are gone (upgraded, removed): what made them is made again.
DANGLING := $(shell find -L '$(BUILD)/lib' -maxdepth 1 -type l 2>/dev/null)

.PHONY: FORCE all lib help format native-tests fuzz-programs bench-programs cuda-archs venv venv-test python wheel lock demo demo-chat test test-long golden test-gpu test-sanitize clean
.DELETE_ON_ERROR:

all: $(LIB) $(BIN) $(CDEF) ## the library libpenstock and the binary penstock
lib: $(LIB) $(CDEF) ## the library only, and its declarations for Python
native-tests: $(TEST_BIN) $(BUILD)/tests/libops_shim.so $(BUILD)/tests/libops_shim_base.so $(BUILD)/tests/libdisk_shim.so $(BUILD)/tests/libfake_nccl.so $(AVX2_LIB) $(BUILD)/bench/limit $(BUILD)/bench/gaps $(BUILD)/bench/gpus ## build the native test programs
fuzz-programs: $(FUZZ_BIN) ## build the fuzz targets (tests/fuzz/driver.c says how to run them at length)
bench-programs: $(BENCH_BIN) ## build the native benchmark programs
cuda-archs: $(ARCHS_OBJ) ## compile the kernels for GPUs that nobody has run them on, and link nothing (ARCHS="89 120")
venv: $(VENV)/.done-requirements-runtime.txt ## the Python environment the demo needs
venv-test: $(VENV_TEST)/.done-references ## another one with the tests' references
demo: all venv ## train a small model on this Python's own sources under two memory caps (TEXT="files": on yours)
	@PENSTOCK_BUILD="$(abspath $(BUILD))" PYTHONPATH=python $(VENV)/bin/python -m penstock.demo --build "$(BUILD)" $(if $(TEXT),--text $(TEXT)) $(DEMO_ARGS)
demo-chat: all venv $(VENV)/.done-requirements-export.txt ## fine-tune a chat model of 135 million parameters (93 MB to download; CHATS="file.jsonl": on your conversations)
	@PENSTOCK_BUILD="$(abspath $(BUILD))" PYTHONPATH=python $(VENV)/bin/python -m penstock.demo_chat --build "$(BUILD)" $(if $(CHATS),--chats "$(CHATS)") $(DEMO_ARGS)
# One process a CPU, at most four: a test's own threads and memory come on top.
test: all native-tests venv-test ## build everything, then every test but the long ones (TESTS="files or options of pytest": some)
	PENSTOCK_BUILD="$(BUILD)" PYTHONPATH=python $(VENV_TEST)/bin/python -m pytest -q -n auto --maxprocesses=4 --dist loadgroup --no-loadscope-reorder $(or $(TESTS),tests)
test-long: all native-tests venv-test ## the tests that take minutes, which make test leaves out (TESTS="...": some)
	PENSTOCK_BUILD="$(BUILD)" PYTHONPATH=python $(VENV_TEST)/bin/python -m pytest -q -m long $(or $(TESTS),tests)
golden: all native-tests venv-test ## write the files of tests/golden anew: a change of them is a commit of its own that says why
	PENSTOCK_BUILD="$(BUILD)" PYTHONPATH=python $(VENV_TEST)/bin/python -m pytest -q -m "long or not long" --write-golden tests/test_golden.py
test-gpu: all native-tests venv-test ## every test that needs a GPU; without one it says why and skips
	PENSTOCK_BUILD="$(BUILD)" PYTHONPATH=python $(VENV_TEST)/bin/python -m pytest -q -rs -m "gpu and not long" tests/test_native.py tests/test_cuda_bad_input.py tests/gpu
	@PENSTOCK_BUILD="$(BUILD)" PYTHON="$(VENV_TEST)/bin/python" tests/gpu/run.sh sanitizers || [ $$? = 77 ]
test-sanitize: venv venv-test ## the engine's tests and a short training under ThreadSanitizer and under AddressSanitizer + UBSan
	@VENV="$(VENV)" VENV_TEST="$(VENV_TEST)" BUILD="$(BUILD)" tests/sanitize.sh
PACKAGE := PENSTOCK_INSTALL_BUILD="$(BUILD)" $(VENV)/bin/python -m pip --quiet --disable-pip-version-check
python: all venv-package ## install the Python package into $(VENV)
	$(PACKAGE) install --no-build-isolation --no-deps --force-reinstall ./python
wheel: all venv-package ## the Python package with library and program as a wheel in $(BUILD)/dist (CUDA_ARCH=all for GPUs other than those here)
	@rm -rf $(BUILD)/dist $(BUILD)/wheel/dist; mkdir -p $(BUILD)/dist
	$(PACKAGE) wheel --no-build-isolation --no-deps --wheel-dir $(BUILD)/wheel/dist ./python
	@PATH="$(abspath $(VENV))/bin:$$PATH" $(VENV)/bin/python -m auditwheel repair -w $(BUILD)/dist $(BUILD)/wheel/dist/*.whl >$(BUILD)/wheel/log 2>&1 || \
	 { cat $(BUILD)/wheel/log; exit 1; }
	@$(VENV)/bin/python -c "import sys; print(*sys.argv[1:])" $(BUILD)/dist/*.whl
venv-package: venv $(VENV)/.done-requirements-wheel.txt
CLANG_FILES = $(shell git ls-files '*.c' '*.h' '*.cu' '*.cuh' '*.cpp')
format: venv-test ## lay out all C, CUDA, C++ and Python sources as .clang-format and .ruff.toml say
	@$(VENV_TEST)/bin/clang-format -i $(CLANG_FILES)
	@$(VENV_TEST)/bin/ruff check --quiet --fix . ; $(VENV_TEST)/bin/ruff format --quiet .
lock: $(BUILD)/venv-lock/.done-requirements-lock.txt ## write python/requirements-*.txt anew from the .in files (LOCK_ARGS="--upgrade")
	@PATH="$(abspath $(BUILD))/venv-lock/bin:$$PATH" $(BUILD)/venv-lock/bin/python python/lock.py $(LOCK_ARGS)
clean: ## remove objects, library and binary; keep the environment
	rm -rf $(BUILD)/cpu $(BUILD)/obj $(BUILD)/bin $(BUILD)/tests $(BUILD)/fuzz $(BUILD)/bench $(LIB) $(ARCHIVE) $(CDEF)
help: ## this list
	@sed -n '/^#/!q;s/^# \{0,1\}//p' Makefile
	@grep -hE '^[a-z][a-z-]*:.*## ' $(MAKEFILE_LIST) | sort | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | awk -F'|' '{printf "%-24s %s\n", $$1, $$2}'

$(VENV)/.done-%: python/% python/bootstrap.sh
	@python/bootstrap.sh $(VENV) python/$* "$(PYTHON)"
$(BUILD)/venv-lock/.done-%: python/% python/bootstrap.sh
	@python/bootstrap.sh $(BUILD)/venv-lock python/$* "$(PYTHON)"
$(VENV_TEST)/.done-%: python/% python/bootstrap.sh
	@python/bootstrap.sh $(VENV_TEST) python/$* "$(PYTHON)"
$(VENV_TEST)/.done-requirements-test.txt: python/requirements-test.txt python/requirements-torch-cpu.txt python/bootstrap.sh
	@PIP_NO_INDEX=1 python/bootstrap.sh $(VENV_TEST) python/requirements-torch-cpu.txt "$(PYTHON)" >/dev/null 2>&1 || true # only if it is there
	@python/bootstrap.sh $(VENV_TEST) python/requirements-test.txt "$(PYTHON)"
# torch comes without its libraries for CUDA; a build of torch that needs them (not every one does) gets them.
$(VENV_TEST)/.done-references: $(VENV_TEST)/.done-requirements-test.txt python/requirements-torch.txt
	@! $(VENV_TEST)/bin/python -c "import importlib.metadata as m, sys; sys.exit('nvidia' not in str(m.requires('torch')))" || \
	 python/bootstrap.sh $(VENV_TEST) python/requirements-torch.txt "$(PYTHON)"
	@touch $@
ifneq ($(DANGLING),)
$(CUBLAS_STAMP) $(CUDNN_STAMP) $(VENV)/.done-requirements-cuda$(CUDA_MAJOR).txt $(VENV)/.done-requirements-cudnn$(CUDA_MAJOR).txt: FORCE
endif

# OpenBLAS out of the pinned wheel: it and what it needs beside our library (found by $ORIGIN), headers under $(BUILD)/blas.
$(BUILD)/lib/libscipy_openblas.so: $(if $(BLAS_PYTHON),,$(VENV)/.done-requirements-runtime.txt)
	@mkdir -p $(BUILD)/lib $(BUILD)/blas
	@"$(or $(BLAS_PYTHON),$(VENV)/bin/python)" -c "import importlib.util, sys; \
	 importlib.util.find_spec('scipy_openblas32') or sys.exit('make: ' + sys.executable + ' has no OpenBLAS: pip install -r python/requirements-runtime.txt, or leave BLAS_PYTHON out'); \
	 import scipy_openblas32 as b, shutil, glob, os; \
	 [shutil.copy(f, '$(BUILD)/blas') for f in glob.glob(os.path.join(b.get_include_dir(), '*.h'))]; \
	 [shutil.copy(f, '$(BUILD)/lib') for f in glob.glob(os.path.join(b.get_lib_dir(), '*.so*'))]"

# BLAS=system: whether the compiler finds the header.
$(BUILD)/.done-cblas:
	@mkdir -p $(BUILD)
	@echo '#include <cblas.h>' | $(CC) $(PS_CPPFLAGS) $(CPPFLAGS) $(CFLAGS) -E -x c -o /dev/null - 2>/dev/null || \
	 { echo "make: BLAS=system, but $(CC) finds no cblas.h: install OpenBLAS's headers (libopenblas-dev, openblas-devel), or leave BLAS out" >&2; exit 1; }
	@touch $@

# cuBLAS out of the pinned wheel of the toolkit's major version.
$(BUILD)/cublas/cublasLt.h: $(if $(CUBLAS_PYTHON),,$(VENV)/.done-requirements-cuda$(CUDA_MAJOR).txt)
	@mkdir -p $(BUILD)/lib $(BUILD)/cublas; rm -f $(DANGLING)
	@"$(or $(CUBLAS_PYTHON),$(VENV)/bin/python)" -c "import nvidia, os, glob, shutil, sys; \
	 dirs = [d for p in nvidia.__path__ for s in ('cu$(CUDA_MAJOR)', 'cublas') for d in [os.path.join(p, s)] if os.path.exists(d + '/include/cublasLt.h')]; \
	 dirs or sys.exit('this Python has no cuBLAS for CUDA $(CUDA_MAJOR): pip install -r python/requirements-cuda$(CUDA_MAJOR).txt'); \
	 lib = glob.glob(dirs[0] + '/lib/libcublasLt.so.*')[0]; to = '$(BUILD)/lib/' + os.path.basename(lib); \
	 os.path.lexists(to) and os.remove(to); os.symlink(lib, to); [shutil.copy(f, '$(BUILD)/cublas') for f in glob.glob(dirs[0] + '/include/cublas*.h')]"
	@touch $@

# cuDNN, its frontend and nvrtc.h.
CUDNN_FROM := $(or $(CUDNN_PYTHON),$(if $(CUDNN_HOME),$(PYTHON),$(VENV)/bin/python))
$(BUILD)/cudnn/include/cudnn_frontend.h: python/find_cudnn.py $(if $(CUDNN_PYTHON)$(CUDNN_HOME),,$(VENV)/.done-requirements-cudnn$(CUDA_MAJOR).txt)
	@rm -f $(DANGLING)
	@"$(CUDNN_FROM)" python/find_cudnn.py $(BUILD)/cudnn/include $(BUILD)/lib $(if $(CUDNN_HOME),--home $(CUDNN_HOME)) \
	 $(if $(CUDNN_FRONTEND),--frontend $(CUDNN_FRONTEND)) $(if $(wildcard $(CUDA_TOOLKIT)/include/nvrtc.h),--nvrtc $(CUDA_TOOLKIT)/include)
	@touch $@

ifneq ($(FLASH_ATTN_1),)
# flash-attn's headers and CUTLASS.
$(BUILD)/flash-attn/LICENSE: python/fetch_flash_attn.py python/requirements-flash.txt | $(VENV)/.done-requirements-runtime.txt
	@$(VENV)/bin/python python/fetch_flash_attn.py python/requirements-flash.txt $(BUILD)/flash-attn
	@touch $@
$(FLASH_OBJ): $(STAMP_cu) | $(FLASH_STAMP)
$(filter %/fwd_64.o %/fwd_128.o,$(FLASH_OBJ)): $(BUILD)/obj/native/kernels/cuda/flash/fwd_%.o: native/kernels/cuda/flash/flash_fwd.cu
	@mkdir -p $(dir $@)
	$(call run,NVCC,$<)$(NVCC) $(PS_NVCCFLAGS) $(FLASH_FLAGS) -DPS_FLASH_DIM=$* $(NVCCFLAGS) -MMD -MP -MF $(@:.o=.d) -c $< -o $@
$(filter %/bwd_64.o %/bwd_128.o,$(FLASH_OBJ)): $(BUILD)/obj/native/kernels/cuda/flash/bwd_%.o: native/kernels/cuda/flash/flash_bwd.cu
	@mkdir -p $(dir $@)
	$(call run,NVCC,$<)$(NVCC) $(PS_NVCCFLAGS) $(FLASH_FLAGS) -DPS_FLASH_DIM=$* $(NVCCFLAGS) -MMD -MP -MF $(@:.o=.d) -c $< -o $@
$(BUILD)/obj/native/kernels/cuda/attention_flash.o: PS_NVCCFLAGS += $(FLASH_FLAGS)
$(BUILD)/obj/native/kernels/cuda/attention_flash.o: | $(FLASH_STAMP)
endif

ifneq ($(FLASH_ATTN_4),)
# flash-attn-4's kernels, compiled by NVIDIA's wheels in an environment of their own.
$(FLASH4)/venv/.done-%: python/% python/requirements-flash4.txt python/bootstrap.sh
	@python/bootstrap.sh $(FLASH4)/venv $< "$(PYTHON)"
$(FLASH4)/flash4_table.h: native/kernels/cuda/flash4/generate.py $(FLASH4)/venv/.done-requirements-flash4-cuda$(CUDA_MAJOR).txt
	@$(FLASH4)/venv/bin/python $< $(FLASH4)
$(BUILD)/obj/native/kernels/cuda/attention_flash4.o: PS_NVCCFLAGS += -I$(FLASH4)
$(BUILD)/obj/native/kernels/cuda/attention_flash4.o: $(FLASH4)/flash4_table.h
endif

$(STAMP_c) $(STAMP_cxx) $(STAMP_cu) $(STAMP_link):
	@mkdir -p $(dir $@); rm -f $(basename $@).*; touch $@
	@$(if $(filter $(STAMP_cu),$@),$(if $(CUDA_ARCH_NOTE),echo '$(CUDA_ARCH_NOTE)'))
	@$(if $(filter $(STAMP_cu),$@),$(if $(FLASH_ATTN_NOTE),echo '$(FLASH_ATTN_NOTE)'))
FORCE:

$(BUILD)/obj/%.o: %.cu $(STAMP_cu) | $(CUBLAS_STAMP)
	@mkdir -p $(dir $@)
	$(call run,NVCC,$<)$(NVCC) $(PS_NVCCFLAGS) $(NVCCFLAGS) -MMD -MP -MF $(@:.o=.d) -c $< -o $@
$(BUILD)/archs/%.o: %.cu $(STAMP_cu) | $(CUBLAS_STAMP)
	@mkdir -p $(dir $@)
	$(call run,NVCC,$< for $(ARCHS))$(NVCC) $(ARCHS_NVCCFLAGS) $(NVCCFLAGS) -MMD -MP -MF $(@:.o=.d) -c $< -o $@
$(BUILD)/obj/%.o: %.cpp $(STAMP_cxx) | $(CUDNN_STAMP)
	@mkdir -p $(dir $@)
	$(call run,CXX,$<)$(CXX) $(PS_CPPFLAGS) -isystem $(BUILD)/cudnn/include $(CPPFLAGS) $(PS_CXXFLAGS) $(CXXFLAGS) -MMD -MP -c $< -o $@
$(BUILD)/obj/%.o: %.c $(STAMP_c) | $(BLAS_STAMP) $(CUBLAS_STAMP)
	@mkdir -p $(dir $@)
	$(call run,CC,$<)$(CC) $(PS_CPPFLAGS) $(CPPFLAGS) $(PS_CFLAGS) $(CFLAGS) -MMD -MP -c $< -o $@

$(LIB): $(LIB_OBJ) $(STAMP_link)
	@mkdir -p $(dir $@)
	$(call run,LINK,$@)$(CC) -shared $(PS_LDFLAGS) $(LDFLAGS) -Wl,-rpath,'$$ORIGIN$(NVIDIA_WHEELS)' -Wl,-soname,libpenstock.so -o $@ $(LIB_OBJ) $(PS_LDLIBS) $(LDLIBS)
# The public headers as declarations for cffi, beside the library that they belong to.
$(CDEF): python/generate_cdef.py $(wildcard include/penstock/*.h)
	$(call run,GEN,$@)"$(PYTHON)" $< include $@
$(ARCHIVE): $(LIB_OBJ) $(STAMP_link)
	@mkdir -p $(dir $@)
	$(call run,AR,$@)rm -f $@ && ar rcs $@ $(LIB_OBJ)
$(BIN): $(CLI_OBJ) $(LIB) $(STAMP_link)
	@mkdir -p $(dir $@)
	$(call run,LINK,$@)$(CC) $(PS_LDFLAGS) $(LDFLAGS) -Wl,-rpath,'$$ORIGIN/../lib:$$ORIGIN' -o $@ $(CLI_OBJ) -L$(BUILD)/lib -lpenstock $(PS_LDLIBS) $(LDLIBS)
# Tests and benchmarks link the archive: they may call internal (ps__) functions, which the shared library hides.
$(TEST_BIN): $(BUILD)/tests/%: $(BUILD)/obj/tests/native/%.o $(ARCHIVE) $(STAMP_link)
	@mkdir -p $(dir $@)
	$(call run,LINK,$@)$(CC) $(PS_LDFLAGS) $(LDFLAGS) -Wl,-rpath,'$$ORIGIN/../lib' -o $@ $(filter %.o,$^) $(ARCHIVE) $(PS_LDLIBS) $(LDLIBS)
ifeq ($(CUDA),1)
$(BUILD)/tests/test_cuda_engine $(BUILD)/tests/test_cuda_peers: $(BUILD)/obj/tests/native/cuda_mix.o # its kernels
-include $(BUILD)/obj/tests/native/cuda_mix.d
$(BUILD)/bench/gaps: $(BUILD)/obj/bench/gaps_kernels.o # likewise
-include $(BUILD)/obj/bench/gaps_kernels.d
$(BUILD)/bench/gpus: $(BUILD)/obj/bench/gpus_flows.o # the cases of several GPUs
-include $(BUILD)/obj/bench/gpus_flows.d
endif
$(BUILD)/tests/test_cuda_ops $(BUILD)/tests/libops_shim.so $(BUILD)/bench/kernels: $(OP_CASES:%.c=$(BUILD)/obj/%.o) # the table of cases
$(BUILD)/tests/test_draw: $(DRAW_SETS)
# draw.c for one instruction set, whose bits test_draw compares with the others'.
$(DRAW_SETS): $(BUILD)/obj/tests/native/draw_set_%.o: tests/native/draw_set.c $(STAMP_c)
	@mkdir -p $(dir $@)
	$(call run,CC,$@)$(CC) $(PS_CPPFLAGS) $(CPPFLAGS) $(PS_CFLAGS) $(CFLAGS) -DPS_SET=$* -MMD -MP -c $< -o $@
$(BUILD)/tests/test_grid: $(BUILD)/obj/native/cli/cells.o # the command line's, which the archive has not
$(BUILD)/bench/limit: $(filter-out %/main.o,$(CLI_OBJ)) # likewise, for its options
$(BUILD)/fuzz/fuzz_toml: $(BUILD)/obj/native/cli/toml.o # likewise
# What tests/op_runs.py loads: kernels by name; and the same with kernels for the baseline instruction set alone.
$(BUILD)/tests/libops_shim.so: $(BUILD)/obj/tests/native/ops_shim.o $(ARCHIVE) $(STAMP_link)
	@mkdir -p $(dir $@)
	$(call run,LINK,$@)$(CC) -shared $(PS_LDFLAGS) $(LDFLAGS) -Wl,-rpath,'$$ORIGIN/../lib' -o $@ $(filter %.o,$^) $(ARCHIVE) $(PS_LDLIBS) $(LDLIBS)
OPS_BASE_SRC := tests/native/ops_shim.c $(OP_CASES) native/core/dtype.c $(addprefix native/kernels/cpu/,cross_entropy.c embedding.c matmul.c matmul_rows.c attention_cached.c reduce.c rmsnorm.c glu.c quantize.c)
$(BUILD)/tests/libops_shim_base.so: $(OPS_BASE_SRC) $(ARCHIVE) $(STAMP_link)
	@mkdir -p $(dir $@)
	$(call run,LINK,$@)$(CC) -shared $(PS_CPPFLAGS) $(CPPFLAGS) $(PS_CFLAGS) $(CFLAGS) -DPS_BASELINE=1 $(PS_LDFLAGS) $(LDFLAGS) -Wl,-rpath,'$$ORIGIN/../lib' -o $@ $(filter-out $(STAMP_link),$^) $(PS_LDLIBS) $(LDLIBS)
$(FUZZ_BIN): $(BUILD)/fuzz/%: $(BUILD)/obj/tests/fuzz/%.o $(BUILD)/obj/tests/fuzz/driver.o $(ARCHIVE) $(STAMP_link)
	@mkdir -p $(dir $@)
	$(call run,LINK,$@)$(CC) $(PS_LDFLAGS) $(LDFLAGS) -Wl,-rpath,'$$ORIGIN/../lib' -o $@ $(filter-out $(STAMP_link),$^) $(PS_LDLIBS) $(LDLIBS)
# What tests/test_golden.py trains with: the library with attention for AVX2 in place of that for AVX-512.
$(AVX2_LIB): $(LIB_OBJ) $(BUILD)/obj/tests/native/attention_standin.o $(STAMP_link) $(CDEF)
	@mkdir -p $(dir $@)
	$(call run,LINK,$@)$(CC) -shared $(PS_LDFLAGS) $(LDFLAGS) -Wl,-rpath,'$$ORIGIN/../../../lib' -o $@ $(filter-out %/attention_avx512.o,$(LIB_OBJ)) $(BUILD)/obj/tests/native/attention_standin.o $(PS_LDLIBS) $(LDLIBS)
	@cp $(CDEF) $(dir $@)
# What tests/save_sweep.py and tests/test_faults.py preload.
$(BUILD)/tests/libdisk_shim.so: tests/native/disk_shim.c
	@mkdir -p $(dir $@)
	$(call run,LINK,$@)$(CC) -shared -D_GNU_SOURCE -std=gnu11 -fPIC -Wall -Wextra -O1 -o $@ $< -ldl
# What test_hosts_net opens in NCCL's place.
$(BUILD)/tests/libfake_nccl.so: tests/native/fake_nccl.c tests/native/fake_nccl.h $(STAMP_link)
	@mkdir -p $(dir $@)
	$(call run,LINK,$@)$(CC) -shared $(PS_CPPFLAGS) $(CPPFLAGS) $(PS_CFLAGS) $(CFLAGS) $(PS_LDFLAGS) $(LDFLAGS) -o $@ $<
$(BENCH_BIN): $(BUILD)/bench/%: $(BUILD)/obj/bench/%.o $(ARCHIVE) $(STAMP_link)
	@mkdir -p $(dir $@)
	$(call run,LINK,$@)$(CC) $(PS_LDFLAGS) $(LDFLAGS) -Wl,-rpath,'$$ORIGIN/../lib' -o $@ $(filter %.o,$^) $(ARCHIVE) $(PS_LDLIBS) $(BENCH_LDLIBS) $(LDLIBS)

-include $(LIB_OBJ:.o=.d) $(ARCHS_OBJ:.o=.d) $(DRAW_SETS:.o=.d) $(BUILD)/obj/tests/native/ops_shim.d $(OP_CASES:%.c=$(BUILD)/obj/%.d) $(BUILD)/obj/tests/native/attention_standin.d $(CLI_OBJ:.o=.d) $(TEST_SRC:%.c=$(BUILD)/obj/%.d) $(BENCH_SRC:%.c=$(BUILD)/obj/%.d) $(FUZZ_BIN:$(BUILD)/%=$(BUILD)/obj/tests/%.d)
