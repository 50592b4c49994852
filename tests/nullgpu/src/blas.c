/* cuBLAS: matrix products that are logged and do nothing. The many typed routines are generated stubs that call ng_blas.
   NVIDIA's cuBLAS headers need libcu++, which no wheel brings, so the few types are declared here by their layout. */
#include "nullgpu.h"
#include <stdlib.h>
#include <string.h>

typedef int status; /* cublasStatus_t: 0 is success */
struct blas { cudaStream_t stream; };
struct heuristic { uint64_t algorithm[8]; size_t workspace_bytes; int state; float waves; int reserved[4]; };

#define DESCRIPTOR_BYTES 256 /* the largest opaque descriptor: 32 words of 8 bytes */

status ng_blas(const char *routine, const struct blas *handle) {
    ng_submit(handle->stream, "launch", "api=blas\tname=%s", routine);
    return 0;
}

static status make(void **out, size_t bytes) {
    *out = calloc(1, bytes);
    return 0;
}
static status drop(void *object) {
    free(object);
    return 0;
}
EXPORT status cublasCreate_v2(void **handle) { return make(handle, sizeof(struct blas)); }
EXPORT status cublasDestroy_v2(void *handle) { return drop(handle); }
EXPORT status cublasSetStream_v2(struct blas *handle, cudaStream_t stream) { handle->stream = stream; return 0; }
EXPORT status cublasGetStream_v2(struct blas *handle, cudaStream_t *stream) { *stream = handle->stream; return 0; }
EXPORT status cublasGetPointerMode_v2(void *handle, int *mode) { (void)handle; *mode = 0; return 0; }
EXPORT status cublasGetMathMode(void *handle, int *mode) { (void)handle; *mode = 0; return 0; }
/* Settings that change nothing here and need no log entry. */
EXPORT status cublasSetMathMode(void *handle, int mode) { (void)handle, (void)mode; return 0; }
EXPORT status cublasSetPointerMode_v2(void *handle, int mode) { (void)handle, (void)mode; return 0; }
EXPORT status cublasSetWorkspace_v2(void *handle, void *at, size_t bytes) { (void)handle, (void)at, (void)bytes; return 0; }

EXPORT size_t cublasLtGetVersion(void) { return 130100; }
EXPORT status cublasLtCreate(void **handle) { return make(handle, sizeof(struct blas)); }
EXPORT status cublasLtMatmulDescCreate(void **out, int compute, int scale) {
    (void)compute, (void)scale;
    return make(out, DESCRIPTOR_BYTES);
}
EXPORT status cublasLtMatmulDescDestroy(void *desc) { return drop(desc); }
EXPORT status cublasLtMatmulDescSetAttribute(void *desc, int which, const void *value, size_t bytes) {
    (void)desc, (void)which, (void)value, (void)bytes;
    return 0;
}
EXPORT status cublasLtMatrixLayoutCreate(void **out, int type, uint64_t rows, uint64_t columns, int64_t stride) {
    (void)type, (void)rows, (void)columns, (void)stride;
    return make(out, DESCRIPTOR_BYTES);
}
EXPORT status cublasLtMatrixLayoutDestroy(void *layout) { return drop(layout); }
EXPORT status cublasLtMatrixLayoutSetAttribute(void *layout, int which, const void *value, size_t bytes) {
    (void)layout, (void)which, (void)value, (void)bytes;
    return 0;
}
EXPORT status cublasLtMatmulPreferenceCreate(void **out) { return make(out, DESCRIPTOR_BYTES); }
EXPORT status cublasLtMatmulPreferenceDestroy(void *preference) { return drop(preference); }
EXPORT status cublasLtMatmulPreferenceSetAttribute(void *preference, int which, const void *value, size_t bytes) {
    (void)preference, (void)which, (void)value, (void)bytes;
    return 0;
}
EXPORT status cublasLtMatmulAlgoGetHeuristic(void *handle, void *desc, void *a, void *b, void *c, void *d,
                                             void *preference, int asked, struct heuristic *results, int *given) {
    (void)handle, (void)desc, (void)a, (void)b, (void)c, (void)d, (void)preference, (void)asked;
    memset(results, 0, sizeof *results);
    *given = 1;
    return 0;
}
EXPORT status cublasLtMatmul(void *handle, void *desc, const void *alpha, const void *a, void *a_layout, const void *b,
                             void *b_layout, const void *beta, const void *c, void *c_layout, void *d, void *d_layout,
                             const void *algorithm, void *workspace, size_t workspace_bytes, cudaStream_t stream) {
    (void)handle, (void)desc, (void)alpha, (void)a, (void)a_layout, (void)b, (void)b_layout, (void)beta, (void)c;
    (void)c_layout, (void)d, (void)d_layout, (void)algorithm, (void)workspace, (void)workspace_bytes;
    ng_submit(stream, "launch", "api=blas\tname=cublasLtMatmul");
    return 0;
}
