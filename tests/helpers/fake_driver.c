/* A CUDA driver without a GPU: graphs that a test builds, and a log of what is launched. */

#include <cuda.h>
#include <stdio.h>
#include <string.h>

enum { MOST = 32, BYTES = 64 };

typedef struct {
    CUgraphNodeType type;
    unsigned long function;
    int num_parameters, num_dependencies, dependencies[4], programmatic[4];
    unsigned int sizes[8];
    unsigned char data[BYTES];
    void *pointers[8];
    unsigned int cluster;
    unsigned long long operands[4];
} FakeNode;

static FakeNode nodes[MOST], functions[1024]; /* functions: the last node of each, also after a reset */
static int num_nodes, num_events;
static char text[1 << 14];

static void write_log(const char *line) { strncat(text, line, sizeof text - strlen(text) - 1); }

void fake_reset(void) { num_nodes = num_events = 0, text[0] = 0; }

const char *fake_log(void) { return text; }

void fake_clear_log(void) { text[0] = 0; }

static FakeNode *add(CUgraphNodeType type, int number, const int *dependencies, const int *programmatic) {
    FakeNode *node = &nodes[num_nodes++];
    memset(node, 0, sizeof *node);
    node->type = type, node->num_dependencies = number;
    memcpy(node->dependencies, dependencies, number * sizeof(int));
    memcpy(node->programmatic, programmatic, number * sizeof(int));
    return node;
}

void fake_kernel(unsigned long function, int num_parameters, const unsigned int *sizes, const unsigned char *data,
                 unsigned int cluster, int number, const int *dependencies, const int *programmatic) {
    FakeNode *node = add(CU_GRAPH_NODE_TYPE_KERNEL, number, dependencies, programmatic);
    node->function = function, node->num_parameters = num_parameters, node->cluster = cluster;
    memcpy(node->sizes, sizes, num_parameters * sizeof *sizes);
    unsigned int offset = 0;
    for (int i = 0; i < num_parameters; i++) {
        node->pointers[i] = node->data + offset;
        offset += sizes[i];
    }
    memcpy(node->data, data, offset);
    functions[function % 1024] = *node;
}

void fake_operation(int is_copy, const unsigned long long *operands, int number, const int *dependencies,
                    const int *programmatic) {
    CUgraphNodeType type = is_copy ? CU_GRAPH_NODE_TYPE_MEMCPY : CU_GRAPH_NODE_TYPE_MEMSET;
    memcpy(add(type, number, dependencies, programmatic)->operands, operands, sizeof nodes->operands);
}

CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode *found, size_t *number) {
    (void)graph, *number = num_nodes;
    for (int i = 0; found != NULL && i < num_nodes; i++)
        found[i] = (CUgraphNode)&nodes[i];
    return CUDA_SUCCESS;
}

CUresult cuGraphGetEdges_v2(CUgraph graph, CUgraphNode *from, CUgraphNode *to, CUgraphEdgeData *data, size_t *number) {
    (void)graph;
    size_t edge = 0;
    for (int i = 0; i < num_nodes; i++)
        for (int k = 0; k < nodes[i].num_dependencies; k++, edge++)
            if (from != NULL) {
                from[edge] = (CUgraphNode)&nodes[nodes[i].dependencies[k]], to[edge] = (CUgraphNode)&nodes[i];
                memset(&data[edge], 0, sizeof *data);
                data[edge].type = nodes[i].programmatic[k];
            }
    *number = edge;
    return CUDA_SUCCESS;
}

CUresult cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType *type) {
    *type = ((FakeNode *)node)->type;
    return CUDA_SUCCESS;
}

CUresult cuGraphKernelNodeGetParams_v2(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS *params) {
    FakeNode *fake = (FakeNode *)node;
    memset(params, 0, sizeof *params);
    params->func = (CUfunction)fake->function;
    params->gridDimX = 7, params->gridDimY = params->gridDimZ = 1;
    params->blockDimX = 128, params->blockDimY = params->blockDimZ = 1;
    params->kernelParams = fake->pointers;
    return CUDA_SUCCESS;
}

CUresult cuGraphKernelNodeGetAttribute(CUgraphNode node, CUlaunchAttributeID id, CUlaunchAttributeValue *value) {
    if (id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
        value->clusterDim.x = ((FakeNode *)node)->cluster;
    return CUDA_SUCCESS;
}

CUresult cuGraphMemsetNodeGetParams(CUgraphNode node, CUDA_MEMSET_NODE_PARAMS *params) {
    const unsigned long long *operands = ((FakeNode *)node)->operands;
    memset(params, 0, sizeof *params);
    params->dst = operands[0], params->value = operands[1], params->elementSize = operands[2];
    params->width = operands[3], params->height = 1;
    return CUDA_SUCCESS;
}

CUresult cuGraphMemcpyNodeGetParams(CUgraphNode node, CUDA_MEMCPY3D *params) {
    const unsigned long long *operands = ((FakeNode *)node)->operands;
    memset(params, 0, sizeof *params);
    params->dstMemoryType = params->srcMemoryType = CU_MEMORYTYPE_DEVICE;
    params->dstDevice = operands[0], params->srcDevice = operands[1], params->WidthInBytes = operands[2];
    params->Height = params->Depth = operands[3];
    return CUDA_SUCCESS;
}

static CUresult param_info(unsigned long function, size_t index, size_t *offset, size_t *size) {
    const FakeNode *node = &functions[function % 1024];
    if (index >= (size_t)node->num_parameters)
        return CUDA_ERROR_INVALID_VALUE;
    *offset = 0, *size = node->sizes[index];
    for (size_t i = 0; i < index; i++)
        *offset += node->sizes[i];
    return CUDA_SUCCESS;
}

CUresult cuFuncGetParamInfo(CUfunction function, size_t index, size_t *offset, size_t *size) {
    return param_info((unsigned long)function, index, offset, size);
}

CUresult cuKernelGetParamInfo(CUkernel kernel, size_t index, size_t *offset, size_t *size) {
    return param_info((unsigned long)kernel, index, offset, size);
}

CUresult cuFuncGetName(const char **name, CUfunction function) {
    *name = "function";
    return function == (CUfunction)666 ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
}

CUresult cuKernelGetName(const char **name, CUkernel kernel) {
    (void)kernel, *name = "of a library";
    return CUDA_SUCCESS;
}

#undef cuStreamGetCaptureInfo_v2
CUresult cuStreamGetCaptureInfo_v2(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
                                   const CUgraphNode **dependencies, size_t *number) {
    (void)id, (void)graph, (void)dependencies, (void)number;
    *status = stream == NULL ? CU_STREAM_CAPTURE_STATUS_NONE : CU_STREAM_CAPTURE_STATUS_ACTIVE;
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
    char line[1024];
    unsigned int cluster = 0, programmatic = 0;
    (void)extra;
    for (unsigned int i = 0; i < config->numAttrs; i++)
        if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
            cluster = config->attrs[i].value.clusterDim.x;
        else if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
            programmatic = config->attrs[i].value.programmaticStreamSerializationAllowed;
    int length = snprintf(line, sizeof line, "kernel %lu stream %lu grid %u cluster %u programmatic %u:",
                          (unsigned long)function, (unsigned long)config->hStream, config->gridDimX, cluster,
                          programmatic);
    size_t offset, size;
    for (size_t k = 0; param_info((unsigned long)function, k, &offset, &size) == CUDA_SUCCESS; k++) {
        unsigned long long value = 0;
        memcpy(&value, parameters[k], size < 8 ? size : 8);
        length += snprintf(line + length, sizeof line - length, " %llu", value);
    }
    snprintf(line + length, sizeof line - length, "\n");
    write_log(line);
    return function == (CUfunction)666 ? CUDA_ERROR_LAUNCH_FAILED : CUDA_SUCCESS;
}

static CUresult write_operation(const char *name, unsigned long long one, unsigned long long two, size_t number,
                                CUstream stream) {
    char line[256];
    snprintf(line, sizeof line, "%s stream %lu: %llu %llu %zu\n", name, (unsigned long)stream, one, two, number);
    write_log(line);
    return CUDA_SUCCESS;
}

#undef cuStreamBeginCapture_v2
#undef cuStreamEndCapture
CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode) {
    return write_operation("begin", mode, 0, 0, stream);
}

CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph) {
    *graph = stream == NULL ? NULL : (CUgraph)nodes;
    return stream == NULL ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
}

CUresult cuGraphDestroy(CUgraph graph) { return write_operation("destroy", graph == (CUgraph)nodes, 0, 0, NULL); }

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr address) {
    (void)attribute, *(unsigned int *)data = CU_MEMORYTYPE_DEVICE;
    return address >= 1ull << 40 && address < 1ull << 48 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

#undef cuMemsetD8Async
#undef cuMemsetD16Async
#undef cuMemsetD32Async
#undef cuMemcpyAsync
#undef cuEventRecord
CUresult cuStreamCreate(CUstream *stream, unsigned int flags) {
    *stream = (CUstream)1;
    return CUDA_SUCCESS;
}

/* Addresses of captures: the log has what is reserved, mapped and given back. The first `mappable` bytes can be mapped. */
static size_t mappable = 1ull << 40;
void fake_mappable(size_t bytes) { mappable = bytes; }

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *kind,
                     unsigned long long flags) {
    *handle = 7;
    return write_operation("create", kind->location.id, flags, bytes, NULL);
}

CUresult cuMemAddressReserve(CUdeviceptr *start, size_t bytes, size_t alignment, CUdeviceptr wanted,
                             unsigned long long flags) {
    *start = 1ull << 40;
    return write_operation("reserve", alignment, wanted + flags, bytes, NULL);
}

CUresult cuMemAddressFree(CUdeviceptr start, size_t bytes) {
    return write_operation("unreserve", start, 0, bytes, NULL);
}

CUresult cuMemMap(CUdeviceptr start, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
    if (start - (1ull << 40) + bytes > mappable)
        return CUDA_ERROR_OUT_OF_MEMORY;
    return write_operation("map", start, handle + offset + flags, bytes, NULL);
}

CUresult cuMemUnmap(CUdeviceptr start, size_t bytes) { return write_operation("unmap", start, 0, bytes, NULL); }

CUresult cuMemSetAccess(CUdeviceptr start, size_t bytes, const CUmemAccessDesc *access, size_t number) {
    return write_operation("access", start, access->location.id, bytes, NULL);
}

#undef cuStreamWaitEvent
CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t number, CUstream stream) {
    return write_operation("fill8", to, value, number, stream);
}

CUresult cuMemsetD16Async(CUdeviceptr to, unsigned short value, size_t number, CUstream stream) {
    return write_operation("fill16", to, value, number, stream);
}

CUresult cuMemsetD32Async(CUdeviceptr to, unsigned int value, size_t number, CUstream stream) {
    return write_operation("fill32", to, value, number, stream);
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t number, CUstream stream) {
    return write_operation("copy", to, from, number, stream);
}

CUresult cuEventCreate(CUevent *event, unsigned int flags) {
    (void)flags, *event = (CUevent)(unsigned long)++num_events;
    return CUDA_SUCCESS;
}

CUresult cuEventDestroy_v2(CUevent event) {
    (void)event;
    return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
    return write_operation("record", (unsigned long)event, 0, 0, stream);
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags) {
    return write_operation("wait", (unsigned long)event, flags, 0, stream);
}
