// Runs a list of items: allocations, launches of kernels, memsets, copies, events, and calls of functions of tvm-ffi and of
// torch. What changes from run to run is in one array of 8-byte values, which items refer to by index: a kernel reads as
// many bytes of a value as it needs, so numbers of 32 bits and addresses need no conversion.
#include <cuda.h>
#include <stdint.h>
#include <string.h>

enum { MAX_ARGUMENTS = 64, MAX_DIMS = 4, CUDA_DEVICE = 2 /* kDLCUDA of DLPack */ };

typedef struct { int32_t type, padding; uint64_t value; } Any;  // of tvm-ffi
typedef void *Tensor;                                           // of torch

// Of CUDA's driver, of tvm-ffi (tvm/ffi/c_api.h), and of torch's stable interface (torch/csrc/inductor/aoti_torch/c/shim.h).
// Each returns 0, or an error.
typedef struct {
    CUresult (*launch)(const CUlaunchConfig *, CUfunction, void **, void **);
    CUresult (*set)(CUdeviceptr, unsigned char, size_t, CUstream);
    CUresult (*copy)(CUdeviceptr, CUdeviceptr, size_t, CUstream);
    CUresult (*record)(CUevent, CUstream);
    CUresult (*wait)(CUstream, CUevent, unsigned);
    int (*call)(void *function, Any *arguments, int32_t number, Any *result);
    int (*set_stream)(int32_t type, int32_t device, void *stream, void **before);
    int32_t (*empty)(int64_t dims, const int64_t *sizes, const int64_t *strides, int32_t dtype, int32_t type,
                     int32_t device, Tensor *result);
    int32_t (*from_blob)(void *data, int64_t dims, const int64_t *sizes, const int64_t *strides, int64_t offset,
                         int32_t dtype, int32_t type, int32_t device, Tensor *result);
    int32_t (*view)(Tensor of, int64_t dims, const int64_t *sizes, const int64_t *strides, int64_t offset, Tensor *result);
    int32_t (*data)(Tensor tensor, void **result);
    int32_t (*delete)(Tensor tensor);
    int32_t (*addmm)(Tensor result, Tensor summand, Tensor left, Tensor right, double beta, double alpha);
} Functions;

enum { KERNEL, SET, COPY, RECORD, WAIT, CALL, ALLOCATE, FREE, VIEW, ADDMM };

// lane: the number of the stream. Arguments are values by index:
//     KERNEL   of the kernel `object`. overlaps: it may start before the one in front of it ends (programmatic dependent
//              launch). grid: indices of values
//     SET      an address, a number of bytes, and the value of each
//     COPY     where to, from where, and a number of bytes
//     RECORD, WAIT   none: `object` is the event
//     CALL     of the function `object` of tvm-ffi. memory: its grid[0] arguments, and all that they refer to. The
//              arguments of the item are pairs of a byte of that memory and the value that belongs there
//     ALLOCATE a value for the tensor, its sizes, and pairs of a value for an address in it and how far that is behind
//              its start. grid[0], threads: dimensions and dtype; of VIEW and ADDMM too
//     FREE     a tensor
//     VIEW     a tensor, a value for its view, sizes, strides, and an offset
//     ADDMM    result += left @ right: for each an address, two sizes and two strides
typedef struct {
    void *object;
    char *memory;
    uint32_t kind, lane;
    uint32_t grid[3];
    uint32_t threads, shared_bytes, overlaps;
    uint32_t first_argument, num_arguments;
} Item;

static CUresult launch_kernel(const Item *item, const uint32_t *given, uint64_t *values, CUstream stream,
                              const Functions *functions) {
    CUlaunchAttribute overlap = {.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                                 .value = {.programmaticStreamSerializationAllowed = 1}};
    void *parameters[MAX_ARGUMENTS];
    for (uint32_t i = 0; i < item->num_arguments; i++) parameters[i] = &values[given[i]];
    CUlaunchConfig config = {
        .gridDimX = values[item->grid[0]], .gridDimY = values[item->grid[1]], .gridDimZ = values[item->grid[2]],
        .blockDimX = item->threads, .blockDimY = 1, .blockDimZ = 1,
        .sharedMemBytes = item->shared_bytes, .hStream = stream, .attrs = &overlap, .numAttrs = item->overlaps,
    };
    if (config.gridDimX == 0 || config.gridDimY == 0 || config.gridDimZ == 0) return CUDA_SUCCESS;
    return functions->launch(&config, item->object, parameters, NULL);
}

static int call(const Item *item, const uint32_t *given, const uint64_t *values, const Functions *functions) {
    for (uint32_t i = 0; i < item->num_arguments; i += 2)
        memcpy(item->memory + given[i], &values[given[i + 1]], sizeof(uint64_t));
    Any result = {0};
    return functions->call(item->object, (Any *)item->memory, item->grid[0], &result);
}

static int allocate(const Item *item, const uint32_t *given, uint64_t *values, int32_t type, int device,
                    const Functions *functions) {
    int64_t sizes[MAX_DIMS], strides[MAX_DIMS], step = 1;
    uint32_t dims = item->grid[0];
    for (uint32_t i = dims; i-- > 0; step *= sizes[i]) {
        sizes[i] = values[given[1 + i]];
        strides[i] = step;
    }
    Tensor tensor = NULL;
    void *data = NULL;
    if (functions->empty(dims, sizes, strides, item->threads, type, device, &tensor)) return 1;
    values[given[0]] = (uint64_t)tensor;
    if (functions->data(tensor, &data)) return 1;
    for (uint32_t i = 1 + dims; i < item->num_arguments; i += 2) values[given[i]] = (uint64_t)data + values[given[i + 1]];
    return 0;
}

static int view(const Item *item, const uint32_t *given, uint64_t *values, const Functions *functions) {
    int64_t numbers[2 * MAX_DIMS + 1];
    uint32_t dims = item->grid[0];
    for (uint32_t i = 0; i <= 2 * dims; i++) numbers[i] = values[given[2 + i]];
    return functions->view((Tensor)values[given[0]], dims, numbers, numbers + dims, numbers[2 * dims],
                           (Tensor *)&values[given[1]]);
}

static int addmm(const Item *item, const uint32_t *given, const uint64_t *values, int32_t type, int device,
                 const Functions *functions) {
    Tensor operands[3] = {NULL, NULL, NULL};
    int error = 0;
    for (int i = 0; i < 3; i++, given += 5) {
        int64_t sizes[2] = {values[given[1]], values[given[2]]}, strides[2] = {values[given[3]], values[given[4]]};
        void *data = (void *)values[given[0]];
        error |= functions->from_blob(data, 2, sizes, strides, 0, item->threads, type, device, &operands[i]);
    }
    error = error || functions->addmm(operands[0], operands[0], operands[1], operands[2], 1, 1);
    for (int i = 0; i < 3; i++)
        if (operands[i] != NULL) functions->delete(operands[i]);
    return error;
}

// Returns CUDA's first error, -1 - n if item n failed otherwise, or 0. streams: by lane. type, device: as torch
// names them.
int program_launch(const Item *items, int num_items, const uint32_t *arguments, uint64_t *values,
                   const CUstream *streams, int type, int device, const Functions *functions) {
    int error = 0;
    void *stream_before = NULL;
    functions->set_stream(CUDA_DEVICE, device, streams[0], &stream_before);
    for (int number = 0; number < num_items && error == 0; number++) {
        const Item *item = &items[number];
        const uint32_t *given = arguments + item->first_argument;
        CUstream stream = streams[item->lane];
        switch (item->kind) {
        case KERNEL: error = launch_kernel(item, given, values, stream, functions); break;
        case SET: error = functions->set(values[given[0]], values[given[2]], values[given[1]], stream); break;
        case COPY: error = functions->copy(values[given[0]], values[given[1]], values[given[2]], stream); break;
        case RECORD: error = functions->record(item->object, stream); break;
        case WAIT: error = functions->wait(stream, item->object, 0); break;
        case CALL: error = call(item, given, values, functions) ? -1 - number : 0; break;
        case ALLOCATE: error = allocate(item, given, values, type, device, functions) ? -1 - number : 0; break;
        case VIEW: error = view(item, given, values, functions) ? -1 - number : 0; break;
        case ADDMM: error = addmm(item, given, values, type, device, functions) ? -1 - number : 0; break;
        case FREE:
            functions->delete((Tensor)values[given[0]]);
            values[given[0]] = 0;
            break;
        }
    }
    functions->set_stream(CUDA_DEVICE, device, stream_before, NULL);
    return error;
}
