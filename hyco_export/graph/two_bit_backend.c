/* A stand-in for the vendor's HTP backend that stores named weights in 2 bits instead of 4.
 *
 * HTP has 2-bit weights, but the execution provider cannot ask for them: its INT2 comes out as noise. This library is
 * named as the provider's backend. It hands out the vendor's own functions, but for one: when a static weight of the
 * given names is created with 4 bits a channel and all its values lie in [-2, 1], it says 2 bits instead. The integers
 * stay what they are. Finds the vendor's library as libQnnHtp.so beside itself (a link).
 *
 * Layouts: QAIRT 2.51, x86-64, read from the libraries in use; another layout is not recognised and nothing is changed.
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define HEADER_BYTES 40           /* of a provider: backend id, name, two versions */
#define FUNCTIONS 96              /* slots copied after the header; the vendor has fewer */
#define TENSOR_CREATE 24          /* slot of tensorCreateGraphTensor */
#define PROVIDERS 4               /* the HTP library has one */
#define FAILED 1                  /* any non-zero status */
#define STATIC_TENSOR 4
#define SIGNED_FIXED_POINT_8 0x0308
#define DEFINED 1
#define PER_CHANNEL_OF_WIDTH 3    /* quantisation encoding: bit width, axis, scales */
#define RAW_MEMORY 0

typedef struct {
    uint32_t version, reserved_0, id, reserved_1;
    const char *name;
    uint32_t type, format, dtype, reserved_2;
    uint32_t defined, encoding, bit_width;
    int32_t axis;
    uint32_t channels, reserved_3;
    float *scales;
    int32_t *offsets;
    uint32_t rank, reserved_4;
    uint32_t *dims;
    uint32_t memory_type, reserved_5;
    const uint8_t *data;
    uint32_t bytes;
} Tensor;

typedef struct {
    unsigned char header[HEADER_BYTES];
    void *functions[FUNCTIONS];
} Provider;

typedef uint64_t (*TensorCreate)(void *graph, Tensor *tensor);
typedef uint64_t (*GetProviders)(const Provider ***providers, uint32_t *count);

static char **names;
static uint32_t name_count;
static uint32_t narrowed;
static TensorCreate vendor_create;
static Provider copies[PROVIDERS];
static const Provider *listed[PROVIDERS];

/* Weights to narrow from now on, by tensor name; forgets earlier ones and the count. Zero: done. */
int hyco_two_bit_names(const char *const *wanted, uint32_t count) {
    for (uint32_t i = 0; i < name_count; i++) free(names[i]);
    free(names);
    name_count = narrowed = 0;
    names = calloc(count ? count : 1, sizeof *names);
    if (names == NULL) return FAILED;
    for (; name_count < count; name_count++)
        if ((names[name_count] = strdup(wanted[name_count])) == NULL) return FAILED;
    return 0;
}

/* How many weights were narrowed since the names were given. */
uint32_t hyco_two_bit_count(void) { return narrowed; }

static int is_named(const char *name) {
    for (uint32_t i = 0; i < name_count; i++)
        if (name != NULL && strcmp(names[i], name) == 0) return 1;
    return 0;
}

/* One value a byte, its low half signed. */
static int fits_two_bits(const Tensor *tensor) {
    for (uint32_t i = 0; i < tensor->bytes; i++) {
        int value = (tensor->data[i] & 0x0f) ^ 8;
        if (value - 8 < -2 || value - 8 > 1) return 0;
    }
    return tensor->bytes > 0;
}

static int can_narrow(const Tensor *tensor) {
    return (tensor->version == 1 || tensor->version == 2) && tensor->type == STATIC_TENSOR &&
           tensor->dtype == SIGNED_FIXED_POINT_8 && tensor->defined == DEFINED &&
           tensor->encoding == PER_CHANNEL_OF_WIDTH && tensor->bit_width == 4 && tensor->memory_type == RAW_MEMORY &&
           tensor->data != NULL && is_named(tensor->name) && fits_two_bits(tensor);
}

static uint64_t create_tensor(void *graph, Tensor *tensor) {
    if (tensor == NULL || !can_narrow(tensor)) return vendor_create(graph, tensor);
    tensor->bit_width = 2;
    uint64_t status = vendor_create(graph, tensor);
    tensor->bit_width = 4; /* the caller's struct as it was */
    narrowed += status == 0;
    return status;
}

static GetProviders vendor_providers(void) {
    Dl_info self;
    char beside[PATH_MAX], real[PATH_MAX];
    if (!dladdr((void *)hyco_two_bit_count, &self) || strlen(self.dli_fname) >= sizeof beside - 32) return NULL;
    strcpy(beside, self.dli_fname);
    char *slash = strrchr(beside, '/');
    strcpy(slash == NULL ? beside : slash + 1, "libQnnHtp.so");
    if (realpath(beside, real) == NULL) return NULL; /* its own folder is where it looks for its other parts */
    void *vendor = dlopen(real, RTLD_NOW | RTLD_LOCAL);
    return vendor == NULL ? NULL : (GetProviders)dlsym(vendor, "QnnInterface_getProviders");
}

/* What the execution provider asks a backend for. */
uint64_t QnnInterface_getProviders(const Provider ***providers, uint32_t *count) {
    GetProviders vendor = vendor_providers();
    const Provider **found = NULL;
    uint32_t found_count = 0;
    if (vendor == NULL || vendor(&found, &found_count) != 0 || found_count == 0) return FAILED;
    if (found_count > PROVIDERS) found_count = PROVIDERS;
    for (uint32_t i = 0; i < found_count; i++) {
        copies[i] = *found[i];
        vendor_create = (TensorCreate)copies[i].functions[TENSOR_CREATE];
        copies[i].functions[TENSOR_CREATE] = (void *)create_tensor;
        listed[i] = &copies[i];
    }
    *providers = listed;
    *count = found_count;
    return 0;
}
