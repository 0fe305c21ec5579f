# How native code is compiled and linked: flags, sources, the library and the program, and the
# programs of tests and benchmarks. The Makefile includes this.

ifneq ($(filter default undefined,$(origin CC)),)
CC := $(shell command -v cc || command -v gcc || command -v clang || echo cc)
endif
ifneq ($(filter default undefined,$(origin CXX)),)
CXX := $(shell command -v c++ || command -v g++ || command -v clang++ || echo c++)
endif

# $(call run,WHAT,FILE) before a command prints a short line in its place, or with V=1 the command.
quiet := $(findstring s,$(firstword -$(MAKEFLAGS)))
run = $(if $(filter 1,$(V)),,@$(if $(quiet),,printf '  %-5s %s\n' $1 '$2';) )

# $(call stamp,WHAT) is a file for the compiler or linker WHAT, with the sum of its command
# $(CONFIG_WHAT) in its name. Another command is another stamp, which takes the place of the old one
# and is newer than what that command made.
QUOTE := '
quoted = '$(subst $(QUOTE),$(QUOTE)\$(QUOTE)$(QUOTE),$1)'
sum = $(firstword $(shell printf '%s' $(call quoted,$1) | cksum))
stamp = $(BUILD)/obj/.config-$1.$(call sum,$(CONFIG_$1))
new_stamp = @mkdir -p $(dir $@); rm -f $(basename $@).*; touch $@

PS_CPPFLAGS := -Iinclude -Inative -D_GNU_SOURCE
PS_CFLAGS := -std=gnu11 -fPIC -fvisibility=hidden -ffp-contract=off -fno-math-errno -pthread \
  -Wall -Wextra -Wno-unused-parameter
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

# OpenBLAS is opened at run time (kernels/cpu/matmul.c); only the benchmark that compares with its
# threads links it.
ifeq ($(BLAS),wheel)
BLAS_STAMP := $(BUILD)/lib/libscipy_openblas.so
PS_CPPFLAGS += -I$(BUILD)/blas -DPS_BLAS_WHEEL=1
BENCH_LDLIBS := -L$(BUILD)/lib -lscipy_openblas
else
BLAS_STAMP := $(BUILD)/.done-cblas
PS_CPPFLAGS += $(shell pkg-config --cflags openblas 2>/dev/null)
BENCH_LDLIBS := $(shell pkg-config --libs openblas 2>/dev/null || echo -lopenblas)
endif

LIB_SRC := $(wildcard $(patsubst %,native/%/*.c,core api engine backends backends/* kernels \
  kernels/ops kernels/cpu optim model model/families hardware step plan generate train io hosts))
LIB_SRC := $(sort $(LIB_SRC) native/kernels/cuda/gemm_cache.c)

include native/cuda.mk

CLI_SRC := $(sort $(wildcard native/cli/*.c))
TEST_SRC := $(sort $(wildcard tests/native/test_*.c)) tests/native/golden.c
BENCH_SRC := $(filter-out bench/gpus_flows.c,$(sort $(wildcard bench/*.c)))
LIB_OBJ := $(LIB_SRC:%.c=$(BUILD)/obj/%.o) $(CU_OBJ)
CLI_OBJ := $(CLI_SRC:%.c=$(BUILD)/obj/%.o)
LIB := $(BUILD)/lib/libpenstock.so
CDEF := $(BUILD)/lib/penstock.cdef
ARCHIVE := $(BUILD)/lib/libpenstock.a
BIN := $(BUILD)/bin/penstock

CONFIG_c := $(CC) $(PS_CPPFLAGS) $(CPPFLAGS) $(PS_CFLAGS) $(CFLAGS)
CONFIG_cxx := $(CXX) $(PS_CPPFLAGS) $(CPPFLAGS) $(PS_CXXFLAGS) $(CXXFLAGS)
CONFIG_link := $(CC) $(PS_LDFLAGS) $(LDFLAGS) $(PS_LDLIBS) $(LDLIBS) $(LIB_OBJ)
STAMP_c := $(call stamp,c)
STAMP_cxx := $(call stamp,cxx)
STAMP_link := $(call stamp,link)
$(STAMP_c) $(STAMP_cxx) $(STAMP_link):
	$(new_stamp)

COMPILE_C = $(CC) $(PS_CPPFLAGS) $(CPPFLAGS) $(PS_CFLAGS) $(CFLAGS)
COMPILE_CXX = $(CXX) $(PS_CPPFLAGS) -isystem $(BUILD)/cudnn/include $(CPPFLAGS) \
  $(PS_CXXFLAGS) $(CXXFLAGS)
LINK = $(CC) $(PS_LDFLAGS) $(LDFLAGS)
LINK_SHARED = $(CC) -shared $(PS_LDFLAGS) $(LDFLAGS)
LIBS = $(PS_LDLIBS) $(LDLIBS)
# Tests and benchmarks find OpenBLAS beside the library.
IN_BUILD := -Wl,-rpath,'$$ORIGIN/../lib'

$(BUILD)/obj/%.o: %.cpp $(STAMP_cxx) | $(CUDNN_STAMP)
	@mkdir -p $(dir $@)
	$(call run,CXX,$<)$(COMPILE_CXX) -MMD -MP -c $< -o $@
$(BUILD)/obj/%.o: %.c $(STAMP_c) | $(BLAS_STAMP) $(CUBLAS_STAMP)
	@mkdir -p $(dir $@)
	$(call run,CC,$<)$(COMPILE_C) -MMD -MP -c $< -o $@

$(LIB): $(LIB_OBJ) $(STAMP_link)
	@mkdir -p $(dir $@)
	$(call run,LINK,$@)$(LINK_SHARED) -Wl,-rpath,'$$ORIGIN$(NVIDIA_WHEELS)' \
	 -Wl,-soname,libpenstock.so -o $@ $(LIB_OBJ) $(LIBS)
# The public headers as declarations for cffi, beside the library that they belong to.
$(CDEF): python/generate_cdef.py $(wildcard include/penstock/*.h)
	$(call run,GEN,$@)"$(PYTHON)" $< include $@
$(ARCHIVE): $(LIB_OBJ) $(STAMP_link)
	@mkdir -p $(dir $@)
	$(call run,AR,$@)rm -f $@ && ar rcs $@ $(LIB_OBJ)
$(BIN): $(CLI_OBJ) $(LIB) $(STAMP_link)
	@mkdir -p $(dir $@)
	$(call run,LINK,$@)$(LINK) -Wl,-rpath,'$$ORIGIN/../lib:$$ORIGIN' -o $@ $(CLI_OBJ) \
	 -L$(BUILD)/lib -lpenstock $(LIBS)

# ---- tests and benchmarks ------------------------------------------------------------------------

TEST_BIN := $(TEST_SRC:tests/native/%.c=$(BUILD)/tests/%)
FUZZ_BIN := $(patsubst tests/fuzz/%.c,$(BUILD)/fuzz/%,$(sort $(wildcard tests/fuzz/fuzz_*.c)))
BENCH_BIN := $(BENCH_SRC:bench/%.c=$(BUILD)/bench/%)
OP_CASES := $(patsubst %,tests/native/%.c,op_cases op_cases_layers op_cases_products \
  op_cases_fp8 op_cases_moe op_cases_delta op_cases_sinks op_cases_mla)
DRAW_SETS := $(patsubst %,$(BUILD)/obj/tests/native/draw_set_%.o,sse2 avx2 avx512f)
STANDIN := $(BUILD)/obj/tests/native/attention_standin.o
AVX2_LIB := $(BUILD)/tests/avx2/lib/libpenstock.so
NATIVE_TESTS := $(TEST_BIN) $(AVX2_LIB) $(addprefix $(BUILD)/bench/,limit gaps gpus arena hog) \
  $(patsubst %,$(BUILD)/tests/lib%.so,ops_shim ops_shim_base disk_shim fake_nccl)

# They link the archive: they may call internal (ps__) functions, which the shared library hides.
$(TEST_BIN): $(BUILD)/tests/%: $(BUILD)/obj/tests/native/%.o $(ARCHIVE) $(STAMP_link)
	@mkdir -p $(dir $@)
	$(call run,LINK,$@)$(LINK) $(WRAP) $(IN_BUILD) -o $@ $(filter %.o,$^) $(ARCHIVE) $(LIBS)
$(BENCH_BIN): $(BUILD)/bench/%: $(BUILD)/obj/bench/%.o $(ARCHIVE) $(STAMP_link)
	@mkdir -p $(dir $@)
	$(call run,LINK,$@)$(LINK) $(IN_BUILD) -o $@ $(filter %.o,$^) $(ARCHIVE) $(PS_LDLIBS) \
	 $(BENCH_LDLIBS) $(LDLIBS)
FUZZ_DRIVER := $(BUILD)/obj/tests/fuzz/driver.o
$(FUZZ_BIN): $(BUILD)/fuzz/%: $(BUILD)/obj/tests/fuzz/%.o $(FUZZ_DRIVER) $(ARCHIVE) $(STAMP_link)
	@mkdir -p $(dir $@)
	$(call run,LINK,$@)$(LINK) $(IN_BUILD) -o $@ $(filter-out $(STAMP_link),$^) $(LIBS)

# What else some of them are made of: kernels, the table of cases, the command line's objects.
ifeq ($(CUDA),1)
$(addprefix $(BUILD)/tests/,test_cuda_engine test_cuda_peers): $(BUILD)/obj/tests/native/cuda_mix.o
$(BUILD)/bench/gaps: $(BUILD)/obj/bench/gaps_kernels.o
$(BUILD)/bench/gpus: $(BUILD)/obj/bench/gpus_flows.o
-include $(patsubst %,$(BUILD)/obj/%.d,tests/native/cuda_mix bench/gaps_kernels bench/gpus_flows)
endif
$(addprefix $(BUILD)/,tests/test_cuda_ops tests/libops_shim.so bench/kernels): \
  $(OP_CASES:%.c=$(BUILD)/obj/%.o)
$(BUILD)/tests/test_draw: $(DRAW_SETS)
$(BUILD)/tests/test_grid: $(BUILD)/obj/native/cli/cells.o
# test_train_beside replaces ps_engine_create(): its engines have a backend of its own.
$(BUILD)/tests/test_train_beside: private WRAP := -Wl,--wrap=ps_engine_create
$(BUILD)/bench/limit: $(filter-out %/main.o,$(CLI_OBJ))
$(BUILD)/fuzz/fuzz_toml: $(BUILD)/obj/native/cli/toml.o

# draw.c for one instruction set, whose bits test_draw compares with the others'.
$(DRAW_SETS): $(BUILD)/obj/tests/native/draw_set_%.o: tests/native/draw_set.c $(STAMP_c)
	@mkdir -p $(dir $@)
	$(call run,CC,$@)$(COMPILE_C) -DPS_SET=$* -MMD -MP -c $< -o $@
# What tests/op_runs.py loads: kernels by name; and the same with kernels for the baseline
# instruction set alone.
$(BUILD)/tests/libops_shim.so: $(BUILD)/obj/tests/native/ops_shim.o $(ARCHIVE) $(STAMP_link)
	@mkdir -p $(dir $@)
	$(call run,LINK,$@)$(LINK_SHARED) $(IN_BUILD) -o $@ $(filter %.o,$^) $(ARCHIVE) $(LIBS)
BASE_KERNELS := cross_entropy embedding matmul matmul_rows attention_cached reduce rmsnorm glu \
  quantize moe
OPS_BASE_SRC := tests/native/ops_shim.c $(OP_CASES) native/core/dtype.c \
  $(BASE_KERNELS:%=native/kernels/cpu/%.c)
$(BUILD)/tests/libops_shim_base.so: $(OPS_BASE_SRC) $(ARCHIVE) $(STAMP_link)
	@mkdir -p $(dir $@)
	$(call run,LINK,$@)$(COMPILE_C) -shared -DPS_BASELINE=1 $(PS_LDFLAGS) $(LDFLAGS) $(IN_BUILD) \
	 -o $@ $(filter-out $(STAMP_link),$^) $(LIBS)
# What tests/test_golden.py trains with: the library with attention for AVX2 in place of that for
# AVX-512.
$(AVX2_LIB): $(LIB_OBJ) $(STANDIN) $(STAMP_link) $(CDEF)
	@mkdir -p $(dir $@)
	$(call run,LINK,$@)$(LINK_SHARED) -Wl,-rpath,'$$ORIGIN/../../../lib' -o $@ \
	 $(filter-out %/attention_avx512.o,$(LIB_OBJ)) $(STANDIN) $(LIBS)
	@cp $(CDEF) $(dir $@)
# What tests/save_sweep.py and tests/test_faults.py preload.
$(BUILD)/tests/libdisk_shim.so: tests/native/disk_shim.c
	@mkdir -p $(dir $@)
	$(call run,LINK,$@)$(CC) -shared -D_GNU_SOURCE -std=gnu11 -fPIC -Wall -Wextra -O1 -o $@ $< -ldl
# What test_hosts_net opens in NCCL's place.
$(BUILD)/tests/libfake_nccl.so: tests/native/fake_nccl.c tests/native/fake_nccl.h $(STAMP_link)
	@mkdir -p $(dir $@)
	$(call run,LINK,$@)$(COMPILE_C) -shared $(PS_LDFLAGS) $(LDFLAGS) -o $@ $<

-include $(LIB_OBJ:.o=.d) $(CLI_OBJ:.o=.d) $(ARCHS_OBJ:.fatbin=.d) $(DRAW_SETS:.o=.d)
-include $(TEST_SRC:%.c=$(BUILD)/obj/%.d) $(BENCH_SRC:%.c=$(BUILD)/obj/%.d)
-include $(FUZZ_BIN:$(BUILD)/%=$(BUILD)/obj/tests/%.d) $(OP_CASES:%.c=$(BUILD)/obj/%.d)
-include $(BUILD)/obj/tests/native/ops_shim.d $(STANDIN:.o=.d)
