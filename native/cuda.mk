# What CUDA adds: the toolkit, the GPUs to compile for, the attention libraries, and how .cu files
# are compiled. native/build.mk includes this between its flags and its objects. The driver and
# cuBLASLt are opened at run time, so that what is built here also loads on machines without a GPU.

ifeq ($(CUDA),auto)
override CUDA := $(if $(NVCC),1,0)
endif
ifneq ($(CUDA),1)
ifneq ($(filter-out auto 0,$(FLASH_ATTN)),)
$(error FLASH_ATTN=$(FLASH_ATTN) is attention on GPUs, and this is a build without CUDA: \
  install the CUDA toolkit, or leave FLASH_ATTN out)
endif
LIB_SRC := $(filter-out native/backends/cuda/%,$(LIB_SRC))
else
ifeq ($(NVCC),)
$(error CUDA=1, but there is no nvcc: install the CUDA toolkit (12.4 or newer), or set CUDA_HOME \
  to where it is)
endif

# ---- the toolkit and the GPUs to compile for -----------------------------------------------------

CUDA_TOOLKIT := $(realpath $(shell $(NVCC) --dryrun -x cu /dev/null 2>&1 | sed -n 's/^.. TOP=//p'))
CUDA_MAJOR := $(shell $(NVCC) --version | sed -n 's/.*release \([0-9]*\)\..*/\1/p')
CUDA_KNOWN := $(patsubst compute_%,%,$(shell $(NVCC) --list-gpu-arch))
CUDA_LIB := $(firstword $(wildcard $(addprefix $(CUDA_TOOLKIT)/,\
              lib64 targets/x86_64-linux/lib lib)))
CUDA_HERE := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | \
               tr -dc '0-9\n' | sort -un)
# Toolkits of 12.8 and newer can load what flash-attn-4 is compiled to.
CUDA_LOADS_LIBRARIES := $(shell grep -l cudaLibraryLoadData \
                          $(CUDA_TOOLKIT)/include/cuda_runtime_api.h 2>/dev/null)
ifeq ($(origin CUDA_ARCH),undefined)
CUDA_ARCH := $(or $(CUDA_HERE),80)
CUDA_ARCH_NOTE := $(if $(CUDA_HERE),,no GPU here: building for compute capability 8.0, which newer \
  GPUs translate at first use (CUDA_ARCH="90 120" or CUDA_ARCH=all: for others; CUDA=0: for the \
  CPU alone))
endif
# flash-attn's machine code for 8.0 serves 8.x; a build for all leaves 9.0 and 10.0 to cuDNN, which
# comes before flash-attn there: each takes minutes.
FLASH_ARCH = $(CUDA_ARCH)
ifeq ($(CUDA_ARCH),all)
override CUDA_ARCH := $(filter $(CUDA_KNOWN),80 86 89 90 100 120)
FLASH_ARCH := $(filter $(CUDA_KNOWN),80 120)
FOR_ALL := 80 90
endif

# $(call codes,80 90): flags of nvcc for their machine code.
codes = $(foreach a,$1,-gencode arch=compute_$(a),code=sm_$(a))
newest = $(foreach a,$(lastword $1),-gencode arch=compute_$(a),code=compute_$(a))
GENCODE := $(call codes,$(CUDA_ARCH)) $(call newest,$(CUDA_ARCH))
PS_CPPFLAGS += -DPS_CUDA=1 -DPS_CUDA_ARCH='"$(strip $(CUDA_ARCH))"' -isystem $(CUDA_TOOLKIT)/include
PS_NVCCFLAGS := -std=c++17 -O3 -lineinfo -Iinclude -Inative -DPS_CUDA=1 -D_GNU_SOURCE \
  -Xcompiler -fPIC,-fvisibility=hidden,-Wall $(GENCODE)
PS_LDLIBS += -L$(CUDA_LIB) -lcudart_static -lrt -lpthread -lstdc++
# An installed package lies beside NVIDIA's wheels: site-packages/penstock/_native and
# site-packages/nvidia.
NVIDIA := :$$ORIGIN/../../nvidia
NVIDIA_WHEELS := $(NVIDIA)/cu$(CUDA_MAJOR)/lib$(NVIDIA)/cublas/lib$(NVIDIA)/cudnn/lib
NVIDIA_WHEELS := $(NVIDIA_WHEELS)$(NVIDIA)/nccl/lib

LIB_SRC := $(sort $(LIB_SRC) $(wildcard native/kernels/cuda/*.c))
CU_SRC := $(sort $(wildcard native/kernels/cuda/*.cu native/optim/cuda/*.cu))

# cuBLASLt's header from the toolkit or from the wheel; its library beside ours, where our rpath
# finds it.
ifeq ($(wildcard $(CUDA_TOOLKIT)/include/cublasLt.h),)
CUBLAS_STAMP := $(BUILD)/cublas/cublasLt.h
PS_CPPFLAGS += -isystem $(BUILD)/cublas
PS_NVCCFLAGS += -isystem $(BUILD)/cublas
endif

# ---- attention -----------------------------------------------------------------------------------

# The library for the GPUs here, or with CUDA_ARCH=all for any, of those that this toolkit,
# processor and CUDA_ARCH allow.
ifeq ($(FLASH_ATTN),auto)
FLASH_ATTN_HERE := $(or $(FOR_ALL),$(filter $(CUDA_ARCH),$(CUDA_HERE)))
override FLASH_ATTN := $(if $(filter 80 86 87 89 12%,$(FLASH_ATTN_HERE)),1)
ifneq ($(and $(filter 90,$(FLASH_ATTN_HERE)),$(filter x86_64,$(shell uname -m)),\
         $(CUDA_LOADS_LIBRARIES)),)
override FLASH_ATTN += 4
endif
override FLASH_ATTN := $(or $(strip $(FLASH_ATTN)),0)
FLASH_ATTN_FOR := $(if $(FOR_ALL),all GPUs,the GPU here (compute capability $(FLASH_ATTN_HERE)))
FLASH_ATTN_NOTE := $(if $(FLASH_ATTN_HERE),attention for $(FLASH_ATTN_FOR): \
  FLASH_ATTN="$(FLASH_ATTN)"; another value chooses another library)
endif
ifneq ($(filter-out 0 1 4,$(FLASH_ATTN)),)
$(error FLASH_ATTN="$(FLASH_ATTN)": it is auto, 0, 1, 4 or "1 4")
endif
FLASH_ATTN_1 := $(filter 1,$(FLASH_ATTN))
FLASH_ATTN_4 := $(filter 4,$(FLASH_ATTN))
CU_SRC := $(filter-out $(if $(FLASH_ATTN_1),,%/attention_flash.cu) \
            $(if $(FLASH_ATTN_4),,%/attention_flash4.cu),$(CU_SRC))

# Grouped products by wgmma, which sm_90a alone has: for a build for 9.0.
ifeq ($(filter 90,$(CUDA_ARCH)),)
CU_SRC := $(filter-out %/gemm_grouped_90.cu,$(CU_SRC))
else
PS_NVCCFLAGS += -DPS_GROUPED_90=1
endif
CU_OBJ := $(CU_SRC:%.cu=$(BUILD)/obj/%.o)

# Through cuDNN: headers under $(BUILD)/cudnn/include (the frontend counts on that name), its
# libraries, which are opened at run time, beside ours.
ifeq ($(CUDNN),1)
CUDNN_STAMP := $(BUILD)/cudnn/include/cudnn_frontend.h
PS_CPPFLAGS += -DPS_CUDNN=1
PS_NVCCFLAGS += -DPS_CUDNN=1
CU_OBJ += $(BUILD)/obj/native/kernels/cuda/attention_cudnn.o
endif

# flash-attn's kernels, one object for each direction and head dim. nvcc takes up to 6 GB for each:
# as many at a time as the memory that is free now allows.
ifneq ($(FLASH_ATTN_1),)
FLASH_STAMP := $(BUILD)/flash-attn/LICENSE
FLASH_FLAGS := -Inative/kernels/cuda/flash/standin -isystem $(BUILD)/flash-attn/src \
  -isystem $(BUILD)/flash-attn/cutlass \
  --expt-relaxed-constexpr --expt-extended-lambda --use_fast_math
FLASH_CODE := $(call codes,$(FLASH_ARCH)) $(call newest,$(FLASH_ARCH))
PS_FLASH_ARCH := -DPS_FLASH_ARCH='"$(strip $(FLASH_ARCH))"'
PS_CPPFLAGS += $(PS_FLASH_ARCH)
PS_NVCCFLAGS += -DPS_FLASH_ATTN=1 $(PS_FLASH_ARCH)
FLASH_OBJ := $(patsubst %,$(BUILD)/obj/native/kernels/cuda/flash/%.o,bwd_128 bwd_64 fwd_128 fwd_64)
ifeq ($(origin FLASH_JOBS),undefined)
FLASH_JOBS := $(shell awk '/^MemAvailable:/ {n = int($$2 / 6e6); print n < 1 ? 1 : n}' \
                /proc/meminfo)
endif
CU_OBJ += $(FLASH_OBJ)
endif

# flash-attn-4's, a static library with its runtime, which cudart_static (behind it) completes.
ifneq ($(FLASH_ATTN_4),)
ifeq ($(filter 90,$(CUDA_ARCH)),)
$(error FLASH_ATTN=4 is for GPUs of compute capability 9.0, which \
  CUDA_ARCH="$(strip $(CUDA_ARCH))" leaves out)
endif
ifeq ($(CUDA_LOADS_LIBRARIES),)
$(error FLASH_ATTN=4 needs a CUDA toolkit of 12.8 or newer: $(CUDA_TOOLKIT) is older)
endif
FLASH4 := $(BUILD)/flash4
PS_NVCCFLAGS += -DPS_FLASH4=1
FLASH4_LIBS := libflash4.a libcuda_dialect_runtime_static.a
PS_LDLIBS := -Wl,--exclude-libs,$(subst .a l,.a:l,$(FLASH4_LIBS)) $(FLASH4_LIBS:%=$(FLASH4)/%) \
  $(PS_LDLIBS)
endif

# ---- rules ---------------------------------------------------------------------------------------

CONFIG_cu := $(NVCC) $(PS_NVCCFLAGS) $(FLASH_FLAGS) $(FLASH_CODE) $(NVCCFLAGS)
STAMP_cu := $(call stamp,cu)
$(STAMP_cu):
	$(new_stamp)
	@$(if $(CUDA_ARCH_NOTE),echo '$(CUDA_ARCH_NOTE)')
	@$(if $(FLASH_ATTN_NOTE),echo '$(FLASH_ATTN_NOTE)')

# CU_FLAGS: of single objects.
COMPILE_CU = $(NVCC) $(PS_NVCCFLAGS) $(CU_FLAGS) $(NVCCFLAGS) -MMD -MP -MF $(basename $@).d
$(BUILD)/obj/%.o: %.cu $(STAMP_cu) | $(CUBLAS_STAMP)
	@mkdir -p $(dir $@)
	$(call run,NVCC,$<)$(COMPILE_CU) -c $< -o $@
$(BUILD)/obj/native/kernels/cuda/gemm_grouped_90.o: \
  PS_NVCCFLAGS := $(subst $(GENCODE),$(call codes,90a),$(PS_NVCCFLAGS))

# Machine code of cuda-archs, which nothing links: a library of all of them would be three times as
# large. Attention libraries have flags of their own, and are for one kind of GPU. Every other build
# compiles the host's side. The first of ARCHS makes the PTX for all: the kernels have no code that
# is for a newer GPU alone. This code is compiled with less optimization, in half the time, as it is
# only to show what does not compile.
ARCHS_SRC := $(filter-out %/attention_flash.cu %/attention_flash4.cu %/gemm_grouped_90.cu,$(CU_SRC))
ARCHS_OBJ := $(ARCHS_SRC:%.cu=$(BUILD)/archs/%.fatbin)
archs_code = $(foreach a,$1,-gencode arch=compute_$(firstword $1),code=sm_$(a))
$(BUILD)/archs/%.fatbin: PS_NVCCFLAGS := \
  $(subst $(GENCODE),$(call archs_code,$(ARCHS)),$(PS_NVCCFLAGS)) -Xcicc -O1
$(BUILD)/archs/%.fatbin: %.cu $(STAMP_cu) | $(CUBLAS_STAMP)
	@mkdir -p $(dir $@)
	$(call run,NVCC,$< for $(ARCHS))$(COMPILE_CU) -fatbin $< -o $@

ifneq ($(FLASH_ATTN_1),)
$(FLASH_STAMP): python/fetch_flash_attn.py python/requirements-flash.txt
$(FLASH_STAMP): | $(VENV)/.done-requirements-runtime.txt
	@$(VENV)/bin/python $< python/requirements-flash.txt $(BUILD)/flash-attn
	@touch $@
$(FLASH_OBJ): $(STAMP_cu) | $(FLASH_STAMP)
FLASH_SRC := native/kernels/cuda/flash/flash_
FLASH_DIM = -DPS_FLASH_DIM=$(lastword $(subst _, ,$(basename $(@F))))
$(filter %/fwd_64.o %/fwd_128.o,$(FLASH_OBJ)): $(FLASH_SRC)fwd.cu
$(filter %/bwd_64.o %/bwd_128.o,$(FLASH_OBJ)): $(FLASH_SRC)bwd.cu
$(FLASH_OBJ): PS_NVCCFLAGS := $(subst $(GENCODE),$(FLASH_CODE),$(PS_NVCCFLAGS))
$(FLASH_OBJ): CU_FLAGS = $(FLASH_FLAGS) $(FLASH_DIM)
# Each waits for the one that is FLASH_JOBS places before it.
FLASH_WAIT_1 := 2:1 3:2 4:3
FLASH_WAIT_2 := 3:1 4:2
FLASH_WAIT_3 := 4:1
flash_obj = $(word $1,$(FLASH_OBJ))
flash_wait = $(call flash_obj,$(firstword $1)): | $(call flash_obj,$(lastword $1))
$(foreach w,$(FLASH_WAIT_$(FLASH_JOBS)),$(eval $(call flash_wait,$(subst :, ,$(w)))))
$(FLASH_OBJ):
	@mkdir -p $(dir $@)
	$(call run,NVCC,$@)$(COMPILE_CU) -c $(filter %.cu,$^) -o $@
$(BUILD)/obj/native/kernels/cuda/attention_flash.o: CU_FLAGS = $(FLASH_FLAGS)
$(BUILD)/obj/native/kernels/cuda/attention_flash.o: | $(FLASH_STAMP)
endif

ifneq ($(FLASH_ATTN_4),)
# Compiled by NVIDIA's wheels in an environment of their own.
$(FLASH4)/venv/.done-%: python/% python/requirements-flash4.txt python/bootstrap.sh
	@python/bootstrap.sh $(FLASH4)/venv $< "$(PYTHON)"
FLASH4_VENV := $(FLASH4)/venv/.done-requirements-flash4-cuda$(CUDA_MAJOR).txt
$(FLASH4)/flash4_table.h: native/kernels/cuda/flash4/generate.py $(FLASH4_VENV)
	@$(FLASH4)/venv/bin/python $< $(FLASH4)
$(BUILD)/obj/native/kernels/cuda/attention_flash4.o: CU_FLAGS = -I$(FLASH4)
$(BUILD)/obj/native/kernels/cuda/attention_flash4.o: $(FLASH4)/flash4_table.h
endif
endif
