/* Stream capture and graphs: who may do what while a capture is live, unjoined work, instantiation, launch.
   Rules follow the CUDA programming guide's chapter on stream capture. */
#include "nullgpu.h"
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* ---- graphs */
int ng_graph_add(struct ng_graph *graph, const char *kind, const struct ng_ints *deps) {
    if (graph->n == graph->room) {
        graph->room = graph->room ? 2 * graph->room : 64;
        graph->node = realloc(graph->node, graph->room * sizeof *graph->node);
    }
    struct ng_node *node = &graph->node[graph->n];
    memset(node, 0, sizeof *node);
    node->kind = kind;
    ng_ints_copy(&node->deps, deps);
    graph->kernels += strcmp(kind, "launch") == 0;
    return graph->n++;
}
static void free_graph(struct ng_graph *graph) {
    for (int i = 0; i < graph->n; i++) free(graph->node[i].deps.at);
    free(graph->node);
    free(graph);
}

/* ---- captures */
#define MAX_LIVE 64
static struct ng_capture *live[MAX_LIVE];
static int n_live;
static unsigned long long last_capture_id;
static __thread enum cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

static long this_thread(void) { return syscall(SYS_gettid); }
unsigned long long ng_live_capture(void) { return n_live ? live[n_live - 1]->id : 0; }
struct ng_capture *ng_capture_by_id(unsigned long long id) {
    for (int i = 0; i < n_live; i++)
        if (live[i]->id == id) return live[i];
    return NULL;
}

cudaError_t ng_violation(struct ng_capture *capture, cudaError_t error, const char *what) {
    ng_lock();
    ng_log("violation", "error=%s\tcapture=%llu\twhat=%s", cudaGetErrorName(error),
           capture ? capture->id : ng_live_capture(), what);
    if (capture) capture->invalid = 1;
    for (int i = 0; i < n_live && !capture; i++) live[i]->invalid = 1;
    ng_unlock();
    return ng_fail(error);
}

cudaError_t ng_unsafe_call(const char *what) {
    if (thread_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
    long me = this_thread();
    struct ng_capture *broken = NULL;
    ng_lock();
    for (int i = 0; i < n_live && !broken; i++) {
        int mine = live[i]->thread == me && live[i]->mode != cudaStreamCaptureModeRelaxed;
        int global = live[i]->mode == cudaStreamCaptureModeGlobal && thread_mode == cudaStreamCaptureModeGlobal;
        if (mine || global) broken = live[i];
    }
    ng_unlock();
    return broken ? ng_violation(broken, cudaErrorStreamCaptureUnsupported, what) : cudaSuccess;
}

EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    enum cudaStreamCaptureMode old = thread_mode;
    thread_mode = *mode;
    *mode = old;
    return cudaSuccess;
}

static cudaError_t begin(cudaStream_t handle, struct ng_graph *graph, enum cudaStreamCaptureMode mode) {
    struct ng_stream *stream = ng_stream_of(handle);
    if (stream == &ng_default_stream)
        return ng_violation(NULL, cudaErrorStreamCaptureUnsupported, "capture of the default stream");
    ng_lock();
    if (stream->capture || n_live == MAX_LIVE) {
        ng_unlock();
        return ng_fail(cudaErrorIllegalState);
    }
    struct ng_capture *capture = calloc(1, sizeof *capture);
    *capture = (struct ng_capture){++last_capture_id, mode, this_thread(), stream, graph, 0};
    live[n_live++] = capture;
    stream->capture = capture;
    stream->tips.n = 0;
    ng_log("capture_begin", "stream=%d\tcapture=%llu\tmode=%d", stream->id, capture->id, mode);
    ng_unlock();
    return cudaSuccess;
}
EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t handle, enum cudaStreamCaptureMode mode) {
    return begin(handle, calloc(1, sizeof(struct ng_graph)), mode);
}

/* Marks in `seen` every node that `tips` depend on, directly or not. Edges point back only, so one sweep is enough. */
static void mark_ancestors(const struct ng_graph *graph, const struct ng_ints *tips, char *seen) {
    for (int i = 0; i < tips->n; i++) seen[tips->at[i]] = 1;
    for (int node = graph->n - 1; node >= 0; node--)
        for (int i = 0; seen[node] && i < graph->node[node].deps.n; i++) seen[graph->node[node].deps.at[i]] = 1;
}
static int has_unjoined_work(const struct ng_capture *capture) {
    char *seen = calloc(capture->graph->n + 1, 1);
    mark_ancestors(capture->graph, &capture->origin->tips, seen);
    int unjoined = 0;
    for (struct ng_stream *s = &ng_default_stream; s; s = s->next)
        for (int i = 0; s->capture == capture && i < s->tips.n; i++) unjoined |= !seen[s->tips.at[i]];
    free(seen);
    return unjoined;
}
static void close_capture(struct ng_capture *capture) {
    for (struct ng_stream *s = &ng_default_stream; s; s = s->next)
        if (s->capture == capture) {
            s->capture = NULL;
            s->tips.n = 0;
        }
    for (int i = 0; i < n_live; i++)
        if (live[i] == capture) {
            live[i] = live[--n_live];
            break;
        }
    free(capture);
}
EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *graph) {
    struct ng_stream *stream = ng_stream_of(handle);
    cudaError_t error = cudaSuccess;
    ng_lock();
    struct ng_capture *capture = stream->capture;
    if (!capture) error = ng_fail(cudaErrorIllegalState);
    else if (capture->origin != stream)
        error = ng_violation(capture, cudaErrorStreamCaptureUnmatched, "capture ended in another stream");
    else if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != this_thread())
        error = ng_violation(capture, cudaErrorStreamCaptureWrongThread, "capture ended in another thread");
    if (error == cudaSuccess) {
        if (!capture->invalid && has_unjoined_work(capture))
            error = ng_violation(capture, cudaErrorStreamCaptureUnjoined, "a forked stream was not joined");
        else if (capture->invalid) error = ng_fail(cudaErrorStreamCaptureInvalidated);
        ng_log("capture_end", "stream=%d\tcapture=%llu\tnodes=%d\tkernels=%d\tok=%d", stream->id, capture->id,
               capture->graph->n, capture->graph->kernels, error == cudaSuccess);
        *graph = error == cudaSuccess ? (cudaGraph_t)capture->graph : NULL;
        close_capture(capture);
    }
    ng_unlock();
    return error;
}
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t handle, enum cudaStreamCaptureStatus *status) {
    const struct ng_capture *capture = ng_stream_of(handle)->capture;
    *status = !capture            ? cudaStreamCaptureStatusNone
              : capture->invalid ? cudaStreamCaptureStatusInvalidated
                                 : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}
EXPORT CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus *status) {
    return (CUresult)cudaStreamIsCapturing(handle, (enum cudaStreamCaptureStatus *)status);
}
/* Node handles are not modelled: a caller sees no dependencies and can therefore not splice nodes in. */
EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, enum cudaStreamCaptureStatus *status,
                                            unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **deps,
                                            const cudaGraphEdgeData **edges, size_t *n_deps) {
    const struct ng_capture *capture = ng_stream_of(handle)->capture;
    if (id) *id = capture ? capture->id : 0;
    if (graph) *graph = capture ? (cudaGraph_t)capture->graph : NULL;
    if (deps) *deps = NULL;
    if (edges) *edges = NULL;
    if (n_deps) *n_deps = 0;
    return cudaStreamIsCapturing(handle, status);
}

/* ---- executable graphs */
#define ALIVE 0x6e67u
struct executable { unsigned alive; int id, nodes, kernels; };
static int last_executable_id;

EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *out, cudaGraph_t handle, unsigned long long flags) {
    (void)flags;
    const struct ng_graph *graph = (const struct ng_graph *)handle;
    struct executable *made = calloc(1, sizeof *made);
    *made = (struct executable){ALIVE, ++last_executable_id, graph->n, graph->kernels};
    ng_log("graph_instantiate", "graph=%d\tnodes=%d\tkernels=%d", made->id, made->nodes, made->kernels);
    *out = (cudaGraphExec_t)made;
    return cudaSuccess;
}
EXPORT cudaError_t cudaGraphInstantiate(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long flags) {
    return cudaGraphInstantiateWithFlags(out, graph, flags);
}
EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t stream) {
    const struct executable *graph = (const struct executable *)handle;
    if (graph->alive != ALIVE) return ng_violation(NULL, cudaErrorInvalidResourceHandle, "launch of a destroyed graph");
    if (!ng_submit(stream, "graph_launch", "graph=%d\tnodes=%d\tkernels=%d", graph->id, graph->nodes, graph->kernels))
        ng_clock_advance(graph->nodes);
    return cudaSuccess;
}
/* The struct stays behind, marked dead, so that a later launch is seen. */
EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t handle) {
    struct executable *graph = (struct executable *)handle;
    graph->alive = 0;
    ng_log("graph_destroy", "graph=%d", graph->id);
    return cudaSuccess;
}
EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t handle) {
    free_graph((struct ng_graph *)handle);
    return cudaSuccess;
}
EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *n) {
    if (nodes) return ng_fail(cudaErrorNotSupported);
    *n = ((const struct ng_graph *)graph)->n;
    return cudaSuccess;
}
