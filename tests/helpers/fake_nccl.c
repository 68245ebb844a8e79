/* A library with NCCL's interface for memory of the host: ranks exchange files of one folder.

   It checks what it is called with, writes every call to FAKE_NCCL/log.RANK, and reports each
   communicator as under way for a few polls. FAKE_NCCL_VERSION is its version; with
   FAKE_NCCL_FAIL=NAME that function fails, with FAKE_NCCL_STUCK communicators never get ready. */
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct { char internal[128]; } Id;
typedef struct {
    size_t size; unsigned magic, version; int blocking, cga, least, most; const char *net; int split;
} Config;
typedef struct {
    char name[33]; int size, rank, polls; long seq, sent[64], received[64]; double factor[16]; int made;
} Comm;
typedef struct {
    int kind, type, op, root; const void *from; void *to; size_t count; Comm *comm; long seq;
} Op;
enum { ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, SEND, RECEIVE };
static const char *names[] = {"AllReduce", "Reduce", "Broadcast", "AllGather", "ReduceScatter",
                              "Send", "Recv"};
static Op queue[256];
static int depth, queued, rank_of_log = -1;

static size_t width(int type) { return (size_t[]){1, 1, 4, 4, 8, 8, 2, 4, 8, 2}[type]; }

static void say(const char *text) {
    char path[512];
    snprintf(path, sizeof path, "%s/log.%d", getenv("FAKE_NCCL"), rank_of_log);
    FILE *file = fopen(path, "a");
    fprintf(file, "%s\n", text);
    fclose(file);
}
static int fails(const char *name) {
    const char *named = getenv("FAKE_NCCL_FAIL");
    return named && !strcmp(named, name);
}
static void put(Comm *comm, long seq, int from, int to, const void *data, size_t bytes) {
    char path[512], whole[520];
    snprintf(whole, sizeof whole, "%s/%s.%ld.%d.%d", getenv("FAKE_NCCL"), comm->name, seq, from, to);
    snprintf(path, sizeof path, "%.500s~", whole);
    FILE *file = fopen(path, "wb");
    fwrite(data, 1, bytes, file);
    fclose(file);
    rename(path, whole);
}
static void get(Comm *comm, long seq, int from, int to, void *data, size_t bytes) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s.%ld.%d.%d", getenv("FAKE_NCCL"), comm->name, seq, from, to);
    for (int tries = 0; access(path, R_OK); tries++) {
        if (tries > 60000) abort();
        usleep(500);
    }
    FILE *file = fopen(path, "rb");
    if (fread(data, 1, bytes, file) != bytes || fgetc(file) != EOF) abort(); /* another size */
    fclose(file);
}
static double half(uint16_t bits) {
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    double value = exponent ? (1 + fraction / 1024.0) : fraction / 512.0;
    for (; exponent > 15; exponent--) value *= 2;
    for (int low = exponent ? exponent : 0; low < 15; low++) value /= 2;
    return bits >> 15 ? -value : value;
}
static uint16_t to_half(double value) { /* of numbers that fp16 has exactly */
    for (int bits = 0; bits < 65536; bits++)
        if ((bits >> 10 & 31) != 31 && half(bits) == value) return bits;
    abort();
}
static double load(const void *data, size_t i, int type) {
    uint32_t wide;
    float single;
    switch (type) {
    case 0: return ((int8_t *)data)[i];
    case 1: return ((uint8_t *)data)[i];
    case 2: return ((int32_t *)data)[i];
    case 4: return (double)((int64_t *)data)[i];
    case 6: return half(((uint16_t *)data)[i]);
    case 7: return ((float *)data)[i];
    case 8: return ((double *)data)[i];
    case 9: wide = (uint32_t)((uint16_t *)data)[i] << 16; memcpy(&single, &wide, 4); return single;
    }
    abort();
}
static void store(void *data, size_t i, int type, double value) {
    uint32_t wide;
    float single = (float)value;
    switch (type) {
    case 0: ((int8_t *)data)[i] = (int8_t)(long)value; return;
    case 1: ((uint8_t *)data)[i] = (uint8_t)(long)value; return;
    case 2: ((int32_t *)data)[i] = (int32_t)value; return;
    case 4: ((int64_t *)data)[i] = (int64_t)value; return;
    case 6: ((uint16_t *)data)[i] = to_half(value); return;
    case 7: ((float *)data)[i] = single; return;
    case 8: ((double *)data)[i] = value; return;
    case 9: memcpy(&wide, &single, 4); ((uint16_t *)data)[i] = (uint16_t)(wide >> 16); return;
    }
    abort();
}
static void reduce(Op *op, const char *terms, size_t each, void *to, size_t begin, size_t count) {
    int n = op->comm->size;
    for (size_t i = 0; i < count; i++) {
        double total = 0;
        for (int rank = 0; rank < n; rank++) {
            double term = load(terms + rank * each, begin + i, op->type);
            if (op->op > 4) term *= op->comm->factor[op->op - 5];
            if (!rank) total = term;
            else if (op->op == 1) total *= term;
            else if (op->op == 2) total = term > total ? term : total;
            else if (op->op == 3) total = term < total ? term : total;
            else total += term;
        }
        if (op->op == 4) total = op->type < 6 ? (double)((long)total / n) : total / n;
        store(to, i, op->type, total);
    }
}
static void begin(Op *op) { /* what this rank gives */
    Comm *comm = op->comm;
    size_t bytes = op->count * width(op->type) * (op->kind == REDUCE_SCATTER ? comm->size : 1);
    if (op->kind == SEND) put(comm, -1 - comm->sent[op->root]++, comm->rank, op->root, op->from, bytes);
    else if (op->kind != RECEIVE) {
        op->seq = comm->seq++;
        if (op->kind != BROADCAST || comm->rank == op->root)
            put(comm, op->seq, comm->rank, 99, op->from, bytes);
    }
}
static void end(Op *op) { /* what this rank gets */
    Comm *comm = op->comm;
    size_t bytes = op->count * width(op->type), each = bytes;
    if (op->kind == SEND) return;
    if (op->kind == RECEIVE)
        { get(comm, -1 - comm->received[op->root]++, op->root, comm->rank, op->to, bytes); return; }
    if (op->kind == BROADCAST) { get(comm, op->seq, op->root, 99, op->to, bytes); return; }
    if (op->kind == REDUCE_SCATTER) each *= comm->size;
    char *terms = malloc(each * comm->size + 1);
    for (int rank = 0; rank < comm->size; rank++)
        get(comm, op->seq, rank, 99, terms + rank * each, each);
    if (op->kind == ALL_GATHER) memcpy(op->to, terms, each * comm->size);
    else if (op->kind == REDUCE_SCATTER) reduce(op, terms, each, op->to, comm->rank * op->count, op->count);
    else if (op->kind == ALL_REDUCE || comm->rank == op->root) reduce(op, terms, each, op->to, 0, op->count);
    free(terms);
}
static int post(int kind, const void *from, void *to, size_t count, int type, int op, int root,
                Comm *comm, void *stream) {
    char line[256];
    if (fails(names[kind])) return 3;
    snprintf(line, sizeof line, "%s count=%zu type=%d op=%d root=%d stream=%ld group=%d",
             names[kind], count, type, op, root, (long)stream, depth > 0);
    say(line);
    if (!comm || comm->polls || type < 0 || type > 9 || root >= comm->size || queued == 256) return 4;
    queue[queued++] = (Op){kind, type, op, root, from, to, count, comm, 0};
    if (depth) return 0;
    begin(queue), end(queue);
    queued = 0;
    comm->polls = 2;
    return 7;
}
int ncclGetVersion(int *version) {
    *version = getenv("FAKE_NCCL_VERSION") ? atoi(getenv("FAKE_NCCL_VERSION")) : 22703;
    return 0;
}
const char *ncclGetErrorString(int result) { return result == 3 ? "internal error" : "invalid argument"; }
const char *ncclGetLastError(void *comm) { return comm ? "" : "the fake library said so"; }
int ncclGetUniqueId(Id *id) {
    FILE *file = fopen("/dev/urandom", "rb");
    size_t got = fread(id->internal, 1, 128, file);
    fclose(file);
    return got == 128 ? 0 : 3;
}
int ncclCommInitRankConfig(Comm **made, int size, Id id, int rank, Config *config) {
    if (fails("CommInitRankConfig")) return 3;
    if (config->size != 48 || config->magic != 0xcafebeef || config->version < 21400 || config->blocking
        || config->cga != INT_MIN || config->least != INT_MIN || config->most != INT_MIN
        || config->net || config->split != INT_MIN || size > 64) return 4;
    Comm *comm = calloc(1, sizeof *comm);
    for (int i = 0; i < 16; i++) sprintf(comm->name + 2 * i, "%02x", (unsigned char)id.internal[i + 112]);
    comm->size = size, comm->rank = rank, comm->polls = 3;
    if (rank_of_log < 0) rank_of_log = rank;
    *made = comm;
    say("CommInitRankConfig");
    put(comm, LONG_MAX, rank, 99, "", 0);
    char nothing[1];
    for (int other = 0; other < size; other++) get(comm, LONG_MAX, other, 99, nothing, 0);
    return 7;
}
int ncclCommGetAsyncError(Comm *comm, int *state) {
    if (comm->polls && !getenv("FAKE_NCCL_STUCK")) comm->polls--;
    *state = comm->polls ? 7 : 0;
    return 0;
}
int ncclCommFinalize(Comm *comm) { say("CommFinalize"); comm->polls = 1; return 7; }
int ncclCommDestroy(Comm *comm) { say("CommDestroy"); free(comm); return 0; }
int ncclCommAbort(Comm *comm) { say("CommAbort"); free(comm); return 0; }
int ncclGroupStart(void) { depth++; return 0; }
int ncclGroupEnd(void) {
    if (--depth) return 0;
    for (int i = 0; i < queued; i++) begin(queue + i);
    for (int i = 0; i < queued; i++) end(queue + i), queue[i].comm->polls = 2;
    int any = queued;
    queued = 0;
    say("GroupEnd");
    return any ? 7 : 0;
}
int ncclAllReduce(const void *from, void *to, size_t count, int type, int op, Comm *comm, void *stream) {
    return post(ALL_REDUCE, from, to, count, type, op, -1, comm, stream);
}
int ncclReduce(const void *from, void *to, size_t count, int type, int op, int root, Comm *comm, void *stream) {
    return post(REDUCE, from, to, count, type, op, root, comm, stream);
}
int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, Comm *comm, void *stream) {
    return post(BROADCAST, from, to, count, type, -1, root, comm, stream);
}
int ncclAllGather(const void *from, void *to, size_t count, int type, Comm *comm, void *stream) {
    return post(ALL_GATHER, from, to, count, type, -1, -1, comm, stream);
}
int ncclReduceScatter(const void *from, void *to, size_t count, int type, int op, Comm *comm, void *stream) {
    return post(REDUCE_SCATTER, from, to, count, type, op, -1, comm, stream);
}
int ncclSend(const void *from, size_t count, int type, int peer, Comm *comm, void *stream) {
    return post(SEND, from, 0, count, type, -1, peer, comm, stream);
}
int ncclRecv(void *to, size_t count, int type, int peer, Comm *comm, void *stream) {
    return post(RECEIVE, 0, to, count, type, -1, peer, comm, stream);
}
int ncclRedOpCreatePreMulSum(int *op, void *scalar, int type, int residence, Comm *comm) {
    if (residence != 1 || comm->made == 16) return 4; /* of the host, read at once */
    comm->factor[comm->made] = load(scalar, 0, type);
    *op = 5 + comm->made++;
    return 0;
}
int ncclRedOpDestroy(int op, Comm *comm) { say("RedOpDestroy"); return op == 4 + comm->made ? comm->made--, 0 : 4; }
