/* Launches a recorded sequence of kernels, copies and fills: the work of one pass of a layer, with almost no host time.
 *
 * sequence_read copies the nodes of a captured CUDA graph. Every node has a block of bytes: the parameters of a kernel,
 * or the operands of a copy or fill. A relocation says that 8 bytes of a block are an address: base number `base` plus
 * `addend`. sequence_launch writes the addresses of this step and launches the nodes on streams.
 *
 * Nodes run in the order of their capture. A lane stands for a stream: lane 0 for the caller's, the others for streams
 * that the capture forked to. A node that depends on a node of another lane waits for its event.
 *
 * The header gives types alone. Functions come from the driver library, which the process has loaded.
 */

#include <cuda.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { KERNEL, FILL, COPY };
/* An address has at most so many bits. In a descriptor for TMA it may be a negative number of as many. */
#define ADDRESS ((1ULL << 57) - 1)

/* Bytes: memory behind the addresses of captures, and what they are a multiple of, as the driver's large ones are. */
enum { SHARED = 1 << 23, ALIGNMENT = 1 << 25, MAX_DEVICES = 64 };
enum { MAX_ATTRIBUTES = 5, MAX_LANES = 4, MAX_WAITS = 4, MAX_BLOCK = 32768, MAX_PARAMETERS = 1024 };

typedef struct {
    uint32_t offset, base;
    int64_t addend;
} Relocation;

typedef struct {
    uint64_t destination, value, element_bytes, width;
} Fill;

typedef struct {
    uint64_t destination, source, bytes;
} Copy;

typedef struct {
    int kind, lane;
    CUfunction function;
    uint32_t grid[3], threads[3], shared_bytes;
    int programmatic; /* starts before the node in front of it has ended */
    int packed;       /* the block is one buffer of all parameters */
    uint32_t num_attributes, num_parameters, num_bytes, num_relocations, num_waits;
    CUlaunchAttribute attributes[MAX_ATTRIBUTES];
    uint32_t *offsets, *sizes; /* of the parameters, in block */
    unsigned char *block;
    Relocation *relocations;
    int waits[MAX_WAITS]; /* nodes of other lanes that have to end first */
    CUevent event;        /* recorded after this node if another lane waits for it, else NULL */
} Node;

typedef struct {
    int num_nodes, num_lanes;
    Node *nodes;
    CUevent start; /* recorded on lane 0 before the first node; all other lanes wait for it */
    int last[MAX_LANES], num_last; /* nodes of other lanes that no node waits for; in the end lane 0 waits for them */
} Sequence;

static CUresult (*graph_get_nodes)(CUgraph, CUgraphNode *, size_t *);
static CUresult (*graph_get_edges)(CUgraph, CUgraphNode *, CUgraphNode *, CUgraphEdgeData *, size_t *);
static CUresult (*node_get_type)(CUgraphNode, CUgraphNodeType *);
static CUresult (*kernel_get_params)(CUgraphNode, CUDA_KERNEL_NODE_PARAMS *);
static CUresult (*kernel_get_attribute)(CUgraphNode, CUlaunchAttributeID, CUlaunchAttributeValue *);
static CUresult (*fill_get_params)(CUgraphNode, CUDA_MEMSET_NODE_PARAMS *);
static CUresult (*copy_get_params)(CUgraphNode, CUDA_MEMCPY3D *);
static CUresult (*function_param_info)(CUfunction, size_t, size_t *, size_t *);
static CUresult (*library_param_info)(CUkernel, size_t, size_t *, size_t *);
static CUresult (*function_name)(const char **, CUfunction);
static CUresult (*library_name)(const char **, CUkernel);
static CUresult (*capture_info)(CUstream, CUstreamCaptureStatus *, cuuint64_t *, CUgraph *, const CUgraphNode **, size_t *);
static CUresult (*begin_capture)(CUstream, CUstreamCaptureMode);
static CUresult (*end_capture)(CUstream, CUgraph *);
static CUresult (*graph_destroy)(CUgraph);
static CUresult (*pointer_attribute)(void *, CUpointer_attribute, CUdeviceptr);
static CUresult (*launch_kernel)(const CUlaunchConfig *, CUfunction, void **, void **);
static CUresult (*fill_8)(CUdeviceptr, unsigned char, size_t, CUstream);
static CUresult (*fill_16)(CUdeviceptr, unsigned short, size_t, CUstream);
static CUresult (*fill_32)(CUdeviceptr, unsigned int, size_t, CUstream);
static CUresult (*copy_async)(CUdeviceptr, CUdeviceptr, size_t, CUstream);
static CUresult (*event_create)(CUevent *, unsigned int);
static CUresult (*event_destroy)(CUevent);
static CUresult (*event_record)(CUevent, CUstream);
static CUresult (*stream_create)(CUstream *, unsigned int);
static CUresult (*stream_wait)(CUstream, CUevent, unsigned int);
static CUresult (*memory_create)(CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long);
static CUresult (*address_reserve)(CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long);
static CUresult (*address_free)(CUdeviceptr, size_t);
static CUresult (*memory_map)(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long);
static CUresult (*memory_unmap)(CUdeviceptr, size_t);
static CUresult (*set_access)(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t);

/* Takes the functions of this driver library. Returns NULL, or the name of what is not there. */
const char *sequence_initialize(const char *path) {
    struct {
        const char *name;
        void *pointer;
    } wanted[] = {
        {"cuGraphGetNodes", &graph_get_nodes},
        {"cuGraphGetEdges_v2", &graph_get_edges},
        {"cuGraphNodeGetType", &node_get_type},
        {"cuGraphKernelNodeGetParams_v2", &kernel_get_params},
        {"cuGraphKernelNodeGetAttribute", &kernel_get_attribute},
        {"cuGraphMemsetNodeGetParams", &fill_get_params},
        {"cuGraphMemcpyNodeGetParams", &copy_get_params},
        {"cuFuncGetParamInfo", &function_param_info},
        {"cuKernelGetParamInfo", &library_param_info},
        {"cuFuncGetName", &function_name},
        {"cuKernelGetName", &library_name},
        {"cuStreamGetCaptureInfo_v2", &capture_info},
        {"cuStreamBeginCapture_v2", &begin_capture},
        {"cuStreamEndCapture", &end_capture},
        {"cuGraphDestroy", &graph_destroy},
        {"cuPointerGetAttribute", &pointer_attribute},
        {"cuLaunchKernelEx", &launch_kernel},
        {"cuMemsetD8Async", &fill_8},
        {"cuMemsetD16Async", &fill_16},
        {"cuMemsetD32Async", &fill_32},
        {"cuMemcpyAsync", &copy_async},
        {"cuEventCreate", &event_create},
        {"cuEventDestroy_v2", &event_destroy},
        {"cuEventRecord", &event_record},
        {"cuStreamCreate", &stream_create},
        {"cuStreamWaitEvent", &stream_wait},
        {"cuMemCreate", &memory_create},
        {"cuMemAddressReserve", &address_reserve},
        {"cuMemAddressFree", &address_free},
        {"cuMemMap", &memory_map},
        {"cuMemUnmap", &memory_unmap},
        {"cuMemSetAccess", &set_access},
    };
    void *driver = dlopen(path, RTLD_NOW);
    if (driver == NULL)
        return path;
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        void *found = dlsym(driver, wanted[i].name);
        if (found == NULL)
            return wanted[i].name;
        memcpy(wanted[i].pointer, &found, sizeof found);
    }
    return NULL;
}

/* A new stream of the current device, or NULL. */
void *sequence_make_stream(void) {
    CUstream stream = NULL;
    return stream_create(&stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS ? stream : NULL;
}

/* Starts the capture of what this thread launches on `stream`. Returns 0, or the driver's error code. */
int sequence_begin_capture(void *stream) {
    return (int)begin_capture((CUstream)stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
}

/* Ends it, also after an error within. Returns the graph, which sequence_destroy_graph destroys, or NULL. */
void *sequence_end_capture(void *stream) {
    CUgraph graph = NULL;
    return end_capture((CUstream)stream, &graph) == CUDA_SUCCESS ? graph : NULL;
}

void sequence_destroy_graph(void *graph) { graph_destroy((CUgraph)graph); }

static void release_addresses(CUdeviceptr start, size_t mapped, size_t reserved) {
    for (size_t at = 0; at < mapped; at += SHARED)
        memory_unmap(start + at, SHARED);
    address_free(start, reserved);
}

static size_t whole_pieces(size_t bytes) { return (bytes + SHARED - 1) / SHARED * SHARED; }

/* Allocates for torch, for captures alone: the same SHARED bytes of a device are behind all addresses. Or NULL. */
void *sequence_allocate_for_capture(size_t bytes, int device, void *stream) {
    static CUmemGenericAllocationHandle pieces[MAX_DEVICES];
    CUmemAllocationProp kind = {.type = CU_MEM_ALLOCATION_TYPE_PINNED};
    CUmemAccessDesc access = {.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    size_t reserved = whole_pieces(bytes), mapped = 0;
    CUdeviceptr start = 0;
    (void)stream;
    kind.location.type = CU_MEM_LOCATION_TYPE_DEVICE, kind.location.id = device;
    access.location = kind.location;
    if (device >= MAX_DEVICES)
        return NULL;
    if (!pieces[device] && memory_create(&pieces[device], SHARED, &kind, 0) != CUDA_SUCCESS)
        return NULL;
    if (address_reserve(&start, reserved, ALIGNMENT, 0, 0) != CUDA_SUCCESS)
        return NULL;
    while (mapped < reserved && memory_map(start + mapped, SHARED, 0, pieces[device], 0) == CUDA_SUCCESS)
        mapped += SHARED;
    if (mapped == reserved && set_access(start, reserved, &access, 1) == CUDA_SUCCESS)
        return (void *)start;
    release_addresses(start, mapped, reserved);
    return NULL;
}

void sequence_free_of_capture(void *start, size_t bytes, int device, void *stream) {
    (void)device, (void)stream;
    release_addresses((CUdeviceptr)start, whole_pieces(bytes), whole_pieces(bytes));
}

/* 1 if the driver knows memory at this address, so that a kernel could read it. */
int sequence_is_known_memory(uint64_t address) {
    unsigned int type = 0;
    return pointer_attribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (CUdeviceptr)address) == CUDA_SUCCESS;
}

/* The number of nodes that `stream` has captured so far, or -1 if it is not capturing. */
int64_t sequence_captured_nodes(void *stream) {
    CUstreamCaptureStatus status;
    CUgraph graph = NULL;
    size_t number = 0;
    if (capture_info((CUstream)stream, &status, NULL, &graph, NULL, NULL) != CUDA_SUCCESS ||
        status != CU_STREAM_CAPTURE_STATUS_ACTIVE || graph_get_nodes(graph, NULL, &number) != CUDA_SUCCESS)
        return -1;
    return (int64_t)number;
}

void sequence_free(Sequence *sequence) {
    if (sequence == NULL)
        return;
    for (int i = 0; i < sequence->num_nodes; i++) {
        Node *node = &sequence->nodes[i];
        if (node->event != NULL)
            event_destroy(node->event);
        free(node->offsets);
        free(node->sizes);
        free(node->block);
        free(node->relocations);
    }
    if (sequence->start != NULL)
        event_destroy(sequence->start);
    free(sequence->nodes);
    free(sequence);
}

static int add_attribute(Node *node, CUgraphNode from, CUlaunchAttributeID id) {
    static const CUlaunchAttributeValue zero;
    CUlaunchAttributeValue value;
    memset(&value, 0, sizeof value);
    /* A driver that does not know the attribute did not set it either. */
    if (kernel_get_attribute(from, id, &value) != CUDA_SUCCESS || memcmp(&value, &zero, sizeof value) == 0)
        return 1;
    if (node->num_attributes == MAX_ATTRIBUTES)
        return 0;
    node->attributes[node->num_attributes].id = id;
    node->attributes[node->num_attributes++].value = value;
    return 1;
}

static const char *read_attributes(Node *node, CUgraphNode from) {
    if (!add_attribute(node, from, CU_LAUNCH_ATTRIBUTE_COOPERATIVE) ||
        !add_attribute(node, from, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) ||
        !add_attribute(node, from, CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE))
        return "a kernel has too many attributes";
    return NULL;
}

/* extra: names, each with its value, up to CU_LAUNCH_PARAM_END. */
static const char *read_packed(Node *node, CUgraphNode from, void **extra) {
    const void *buffer = NULL;
    size_t size = 0;
    for (; *extra != CU_LAUNCH_PARAM_END; extra += 2) {
        if (*extra == CU_LAUNCH_PARAM_BUFFER_POINTER)
            buffer = extra[1];
        else if (*extra == CU_LAUNCH_PARAM_BUFFER_SIZE)
            size = *(const size_t *)extra[1];
    }
    if (buffer == NULL || size > MAX_BLOCK)
        return "a kernel has no or too many parameters";
    node->packed = 1;
    node->num_bytes = (uint32_t)size;
    node->block = malloc(size + 8);
    if (node->block == NULL)
        return "no memory is left";
    memcpy(node->block, buffer, size);
    return read_attributes(node, from);
}

static const char *read_kernel(Node *node, CUgraphNode from) {
    CUDA_KERNEL_NODE_PARAMS params;
    memset(&params, 0, sizeof params);
    if (kernel_get_params(from, &params) != CUDA_SUCCESS)
        return "the driver does not tell a kernel's parameters";
    node->function = params.func != NULL ? params.func : (CUfunction)params.kern;
    if (node->function == NULL)
        return "the driver does not tell a kernel's function";
    uint32_t dims[6] = {params.gridDimX,  params.gridDimY,  params.gridDimZ,
                        params.blockDimX, params.blockDimY, params.blockDimZ};
    memcpy(node->grid, dims, sizeof node->grid);
    memcpy(node->threads, dims + 3, sizeof node->threads);
    node->shared_bytes = params.sharedMemBytes;
    if (params.kernelParams == NULL && params.extra != NULL)
        return read_packed(node, from, params.extra);
    size_t offset, size, end = 0, number = 0;
    int of_library = params.func == NULL || function_param_info(params.func, 0, &offset, &size) != CUDA_SUCCESS;
    node->offsets = malloc(MAX_PARAMETERS * sizeof *node->offsets);
    node->sizes = malloc(MAX_PARAMETERS * sizeof *node->sizes);
    node->block = calloc(1, MAX_BLOCK);
    if (node->offsets == NULL || node->sizes == NULL || node->block == NULL)
        return "no memory is left";
    while ((of_library ? library_param_info((CUkernel)node->function, number, &offset, &size)
                       : function_param_info(node->function, number, &offset, &size)) == CUDA_SUCCESS) {
        if (number == MAX_PARAMETERS || offset + size > MAX_BLOCK)
            return "a kernel has too many parameters";
        node->offsets[number] = (uint32_t)offset;
        node->sizes[number] = (uint32_t)size;
        memcpy(node->block + offset, params.kernelParams[number++], size);
        end = offset + size;
    }
    node->num_parameters = (uint32_t)number;
    node->num_bytes = (uint32_t)((end + 7) / 8 * 8);
    return read_attributes(node, from);
}

static const char *read_operands(Node *node, const void *operands, size_t bytes) {
    node->num_bytes = (uint32_t)bytes;
    node->block = malloc(bytes);
    if (node->block == NULL)
        return "no memory is left";
    memcpy(node->block, operands, bytes);
    return NULL;
}

static const char *read_fill(Node *node, CUgraphNode from) {
    CUDA_MEMSET_NODE_PARAMS params;
    if (fill_get_params(from, &params) != CUDA_SUCCESS || params.height != 1)
        return "a fill of several rows";
    node->kind = FILL;
    Fill fill = {params.dst, params.value, params.elementSize, params.width};
    return read_operands(node, &fill, sizeof fill);
}

static uint64_t address_of(CUmemorytype type, CUdeviceptr device, const void *host) {
    return type == CU_MEMORYTYPE_HOST ? (uint64_t)(uintptr_t)host : (uint64_t)device;
}

static const char *read_copy(Node *node, CUgraphNode from) {
    CUDA_MEMCPY3D params;
    if (copy_get_params(from, &params) != CUDA_SUCCESS || params.Height != 1 || params.Depth != 1 ||
        params.srcMemoryType == CU_MEMORYTYPE_ARRAY || params.dstMemoryType == CU_MEMORYTYPE_ARRAY)
        return "a copy of several rows";
    node->kind = COPY;
    Copy copy = {address_of(params.dstMemoryType, params.dstDevice, params.dstHost) + params.dstXInBytes,
                 address_of(params.srcMemoryType, params.srcDevice, params.srcHost) + params.srcXInBytes,
                 params.WidthInBytes};
    return read_operands(node, &copy, sizeof copy);
}

static int index_of(const CUgraphNode *nodes, int number, CUgraphNode wanted) {
    for (int i = 0; i < number; i++)
        if (nodes[i] == wanted)
            return i;
    return -1;
}

static const char *make_event(CUevent *event) {
    if (*event == NULL && event_create(event, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS)
        return "the driver makes no event";
    return NULL;
}

static const char *add_wait(Sequence *sequence, int node, int dependency) {
    Node *waiting = &sequence->nodes[node];
    if (waiting->num_waits == MAX_WAITS)
        return "a node waits for too many others";
    waiting->waits[waiting->num_waits++] = dependency;
    return make_event(&sequence->nodes[dependency].event);
}

static const char *join_lanes(Sequence *sequence) {
    for (int i = 0; i < sequence->num_nodes; i++) {
        int waited_for = sequence->nodes[i].lane == 0;
        for (int j = i + 1; !waited_for && j < sequence->num_nodes; j++) {
            const Node *later = &sequence->nodes[j];
            waited_for = later->lane == sequence->nodes[i].lane;
            for (uint32_t k = 0; k < later->num_waits; k++)
                waited_for |= later->waits[k] == i;
        }
        if (waited_for)
            continue;
        sequence->last[sequence->num_last++] = i;
        const char *problem = make_event(&sequence->nodes[i].event);
        if (problem != NULL)
            return problem;
    }
    return sequence->num_lanes > 1 ? make_event(&sequence->start) : NULL;
}

/* 1 if a node after `node` depends on `tail` alone. Then it goes on with the lane of `tail`, and `node` does not. */
static int is_continued(const CUgraphNode *nodes, int num_nodes, int node, int tail, const CUgraphNode *from,
                        const CUgraphNode *to, size_t num_edges) {
    for (size_t edge = 0; edge < num_edges; edge++) {
        if (from[edge] != nodes[tail] || index_of(nodes, num_nodes, to[edge]) <= node)
            continue;
        int others = 0;
        for (size_t k = 0; k < num_edges; k++)
            others += k != edge && to[k] == to[edge];
        if (others == 0)
            return 1;
    }
    return 0;
}

/* Gives every node a lane, and waits for the nodes of other lanes that it depends on. */
static const char *order(Sequence *sequence, const CUgraphNode *nodes, const CUgraphNode *from, const CUgraphNode *to,
                         const CUgraphEdgeData *edges, size_t num_edges) {
    int tails[MAX_LANES], dependencies[MAX_WAITS + 1];
    for (int i = 0; i < sequence->num_nodes; i++) {
        Node *node = &sequence->nodes[i];
        int number = 0, lane = -1, programmatic = 1;
        for (size_t edge = 0; edge < num_edges; edge++) {
            if (to[edge] != nodes[i])
                continue;
            int dependency = index_of(nodes, sequence->num_nodes, from[edge]);
            if (dependency < 0 || dependency >= i || number > MAX_WAITS)
                return "nodes are not in the order of their capture";
            dependencies[number++] = dependency;
            programmatic &= edges[edge].type == CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC;
        }
        for (int l = 0; lane < 0 && l < sequence->num_lanes; l++)
            for (int k = 0; k < number; k++)
                if (tails[l] == dependencies[k] &&
                    !is_continued(nodes, sequence->num_nodes, i, tails[l], from, to, num_edges))
                    lane = l;
        if (lane < 0) {
            if (sequence->num_lanes == MAX_LANES)
                return "the capture forks to too many streams";
            lane = sequence->num_lanes++;
            tails[lane] = -1; /* no launch before it that it could overlap */
        }
        node->lane = lane;
        node->programmatic = programmatic && number == 1 && tails[lane] == dependencies[0];
        for (int k = 0; k < number; k++) {
            if (sequence->nodes[dependencies[k]].lane == lane)
                continue;
            const char *problem = add_wait(sequence, i, dependencies[k]);
            if (problem != NULL)
                return problem;
        }
        tails[lane] = i;
    }
    return NULL;
}

/* Copies a captured graph. Returns NULL and sets *out, or returns why it cannot be launched in this way. */
const char *sequence_read(void *captured, Sequence **out) {
    CUgraph graph = captured;
    size_t num_nodes = 0, num_edges = 0;
    if (graph_get_nodes(graph, NULL, &num_nodes) != CUDA_SUCCESS ||
        graph_get_edges(graph, NULL, NULL, NULL, &num_edges) != CUDA_SUCCESS)
        return "the driver does not tell the nodes of a graph";
    CUgraphNode *nodes = malloc((num_nodes + 1) * sizeof *nodes);
    CUgraphNode *from = malloc((num_edges + 1) * sizeof *from), *to = malloc((num_edges + 1) * sizeof *to);
    CUgraphEdgeData *edges = calloc(num_edges + 1, sizeof *edges);
    Sequence *sequence = calloc(1, sizeof *sequence);
    const char *problem = NULL;
    if (nodes == NULL || from == NULL || to == NULL || edges == NULL || sequence == NULL ||
        (sequence->nodes = calloc(num_nodes + 1, sizeof *sequence->nodes)) == NULL)
        problem = "no memory is left";
    else if ((num_nodes && graph_get_nodes(graph, nodes, &num_nodes) != CUDA_SUCCESS) ||
             (num_edges && graph_get_edges(graph, from, to, edges, &num_edges) != CUDA_SUCCESS))
        problem = "the driver does not tell the nodes of a graph";
    for (size_t i = 0; problem == NULL && i < num_nodes; i++) {
        CUgraphNodeType type;
        sequence->num_nodes = (int)i + 1;
        if (node_get_type(nodes[i], &type) != CUDA_SUCCESS)
            problem = "the driver does not tell the kind of a node";
        else if (type == CU_GRAPH_NODE_TYPE_KERNEL)
            problem = read_kernel(&sequence->nodes[i], nodes[i]);
        else if (type == CU_GRAPH_NODE_TYPE_MEMSET)
            problem = read_fill(&sequence->nodes[i], nodes[i]);
        else if (type == CU_GRAPH_NODE_TYPE_MEMCPY)
            problem = read_copy(&sequence->nodes[i], nodes[i]);
        else
            problem = "a node is no kernel, copy or fill";
    }
    if (problem == NULL)
        problem = order(sequence, nodes, from, to, edges, num_edges);
    if (problem == NULL)
        problem = join_lanes(sequence);
    free(nodes);
    free(from);
    free(to);
    free(edges);
    if (problem == NULL)
        *out = sequence;
    else
        sequence_free(sequence);
    return problem;
}

int sequence_num_nodes(const Sequence *sequence) { return sequence->num_nodes; }

int sequence_num_lanes(const Sequence *sequence) { return sequence->num_lanes; }

/* What a node is, for messages. */
const char *sequence_name(const Sequence *sequence, int node) {
    const Node *n = &sequence->nodes[node];
    const char *name;
    if (n->kind != KERNEL)
        return n->kind == COPY ? "copy" : "fill";
    if (function_name(&name, n->function) == CUDA_SUCCESS ||
        library_name(&name, (CUkernel)n->function) == CUDA_SUCCESS)
        return name;
    return "kernel";
}

/* 1 if a word of a node's block belongs to a parameter of more than 8 bytes, a struct, which may have padding. */
int sequence_may_be_padding(const Sequence *sequence, int node, uint32_t offset) {
    const Node *n = &sequence->nodes[node];
    for (uint32_t k = 0; k < n->num_parameters; k++)
        if (n->offsets[k] <= offset && offset < n->offsets[k] + n->sizes[k])
            return n->sizes[k] > 8;
    return 0;
}

/* 0 if no parameter has all 8 bytes of a word of a node's block: then it holds smaller values, and perhaps what was in
   memory between them and in empty structs, as torch's kernels have. */
int sequence_may_be_address(const Sequence *sequence, int node, uint32_t offset) {
    const Node *n = &sequence->nodes[node];
    for (uint32_t k = 0; k < n->num_parameters; k++)
        if (n->offsets[k] <= offset && offset + 8 <= n->offsets[k] + n->sizes[k])
            return 1;
    return n->num_parameters == 0;
}

/* The block of a node, and its length in bytes. */
unsigned char *sequence_block(const Sequence *sequence, int node, uint32_t *num_bytes) {
    *num_bytes = sequence->nodes[node].num_bytes;
    return sequence->nodes[node].block;
}

/* 1 if the same nodes, in the same order on the same lanes, are equal but for their blocks. */
int sequence_equal_but_for_blocks(const Sequence *one, const Sequence *two) {
    if (one->num_nodes != two->num_nodes || one->num_lanes != two->num_lanes)
        return 0;
    for (int i = 0; i < one->num_nodes; i++) {
        const Node *a = &one->nodes[i], *b = &two->nodes[i];
        if (a->kind != b->kind || a->packed != b->packed || a->lane != b->lane || a->function != b->function ||
            memcmp(a->grid, b->grid, sizeof a->grid) != 0 || memcmp(a->threads, b->threads, sizeof a->threads) != 0 ||
            a->shared_bytes != b->shared_bytes || a->programmatic != b->programmatic || a->num_bytes != b->num_bytes ||
            a->num_attributes != b->num_attributes || a->num_waits != b->num_waits ||
            memcmp(a->attributes, b->attributes, sizeof a->attributes) != 0 ||
            memcmp(a->waits, b->waits, sizeof a->waits) != 0)
            return 0;
    }
    return 1;
}

/* Declares 8 bytes of a node's block to be an address. Returns 0 if they are not within the block, or memory is out. */
int sequence_relocate(Sequence *sequence, int node, uint32_t offset, uint32_t base, int64_t addend) {
    Node *n = &sequence->nodes[node];
    if (node < 0 || node >= sequence->num_nodes || offset + 8 > n->num_bytes)
        return 0;
    Relocation *grown = realloc(n->relocations, (n->num_relocations + 1) * sizeof *grown);
    if (grown == NULL)
        return 0;
    n->relocations = grown;
    n->relocations[n->num_relocations++] = (Relocation){offset, base, addend};
    return 1;
}

/* Writes into `block` what the node gets with these bases. The bits above an address stay. */
static void relocate(const Node *node, const uint64_t *bases, unsigned char *block) {
    memcpy(block, node->block, node->num_bytes);
    for (uint32_t k = 0; k < node->num_relocations; k++) {
        const Relocation *at = &node->relocations[k];
        uint64_t word;
        memcpy(&word, block + at->offset, sizeof word);
        word = (word & ~ADDRESS) | ((bases[at->base] + (uint64_t)at->addend) & ADDRESS);
        memcpy(block + at->offset, &word, sizeof word);
    }
}

static CUresult launch(const Node *node, const uint64_t *bases, CUstream stream) {
    _Alignas(128) unsigned char block[MAX_BLOCK];
    relocate(node, bases, block);
    if (node->kind == FILL) {
        Fill fill;
        memcpy(&fill, block, sizeof fill);
        return fill.element_bytes == 1   ? fill_8(fill.destination, (unsigned char)fill.value, fill.width, stream)
               : fill.element_bytes == 2 ? fill_16(fill.destination, (unsigned short)fill.value, fill.width, stream)
                                         : fill_32(fill.destination, (unsigned int)fill.value, fill.width, stream);
    }
    if (node->kind == COPY) {
        Copy copy;
        memcpy(&copy, block, sizeof copy);
        return copy_async(copy.destination, copy.source, copy.bytes, stream);
    }
    void *parameters[MAX_PARAMETERS];
    for (uint32_t k = 0; k < node->num_parameters; k++)
        parameters[k] = block + node->offsets[k];
    CUlaunchAttribute attributes[MAX_ATTRIBUTES + 1];
    memcpy(attributes, node->attributes, node->num_attributes * sizeof *attributes);
    unsigned int number = node->num_attributes;
    if (node->programmatic) {
        attributes[number].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        attributes[number++].value.programmaticStreamSerializationAllowed = 1;
    }
    CUlaunchConfig config = {
        .gridDimX = node->grid[0],
        .gridDimY = node->grid[1],
        .gridDimZ = node->grid[2],
        .blockDimX = node->threads[0],
        .blockDimY = node->threads[1],
        .blockDimZ = node->threads[2],
        .sharedMemBytes = node->shared_bytes,
        .hStream = stream,
        .attrs = attributes,
        .numAttrs = number,
    };
    if (!node->packed)
        return launch_kernel(&config, node->function, parameters, NULL);
    size_t size = node->num_bytes;
    void *extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, block, CU_LAUNCH_PARAM_BUFFER_SIZE, &size, CU_LAUNCH_PARAM_END};
    return launch_kernel(&config, node->function, NULL, extra);
}

/* Launches nodes first..end-1 with these bases. streams: one for each lane. Returns 0, or the driver's error code. */
int sequence_launch(const Sequence *sequence, int first, int end, const uint64_t *bases, void *const *streams) {
    CUresult result = CUDA_SUCCESS;
    if (first == 0 && sequence->start != NULL)
        result = event_record(sequence->start, (CUstream)streams[0]);
    for (int lane = 1; first == 0 && result == CUDA_SUCCESS && lane < sequence->num_lanes; lane++)
        result = stream_wait((CUstream)streams[lane], sequence->start, 0);
    for (int i = first; result == CUDA_SUCCESS && i < end; i++) {
        const Node *node = &sequence->nodes[i];
        CUstream stream = (CUstream)streams[node->lane];
        for (uint32_t k = 0; result == CUDA_SUCCESS && k < node->num_waits; k++)
            result = stream_wait(stream, sequence->nodes[node->waits[k]].event, 0);
        if (result == CUDA_SUCCESS)
            result = launch(node, bases, stream);
        if (result == CUDA_SUCCESS && node->event != NULL)
            result = event_record(node->event, stream);
    }
    for (int k = 0; end == sequence->num_nodes && result == CUDA_SUCCESS && k < sequence->num_last; k++)
        result = stream_wait((CUstream)streams[0], sequence->nodes[sequence->last[k]].event, 0);
    return (int)result;
}

/* Waits, at most so many microseconds, until none of the values is negative. Returns 1 then, else 0. */
int sequence_wait(const volatile int64_t *values, int number, int64_t microseconds) {
    struct timespec start, now;
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (int i = 0; i < number; i++) {
        for (int spins = 1; values[i] < 0; spins++) {
            if (spins % 1024 != 0)
                continue;
            clock_gettime(CLOCK_MONOTONIC, &now);
            if ((now.tv_sec - start.tv_sec) * 1000000 + (now.tv_nsec - start.tv_nsec) / 1000 > microseconds)
                return 0;
        }
    }
    return 1;
}
