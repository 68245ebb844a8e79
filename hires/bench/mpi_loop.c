/* Times calls of an MPI library without any Python: a baseline of `hires bench comm`.
 *
 * It needs no mpi.h: functions and handles come from mpi4py (hires/bench/raw_mpi.py). A handle is an
 * int in MPICH's interface and a pointer in Open MPI's; both fit a word, and a callee that takes an
 * int reads its lower half. Every call is timed alone behind a barrier, as in osu_allreduce and its
 * siblings; messages follow osu_latency, osu_bw and osu_bibw.
 */
#include <stdint.h>

typedef intptr_t word;
enum { LATENCY, BANDWIDTH, BIDIRECTIONAL, ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER,
       REDUCE_SCATTER, ALL_TO_ALL, GATHER, SCATTER, BARRIER };
enum { ROOT = 0, TAG = 11, MOST_MESSAGES = 64, STATUS_WORDS = 16 };

/* In the order of FUNCTIONS in raw_mpi.py; those of collectives are the nonblocking ones if not
 * `blocking`, which take a request behind their other arguments. */
struct library {
    int (*barrier)(word);
    double (*now)(void);
    int (*wait)(word *, void *);
    int (*send)(void *, int, word, int, int, word);
    int (*recv)(void *, int, word, int, int, word, void *);
    int (*isend)(void *, int, word, int, int, word, word *);
    int (*irecv)(void *, int, word, int, int, word, word *);
    int (*call)();
};

struct job {
    word comm, type, sum, in_place;
    void *given, *taken;
    int operation, blocking, count, rank, peer, window;
};

static int messages(const struct library *mpi, const struct job *job) {
    word requests[2 * MOST_MESSAGES], status[STATUS_WORDS];
    int number = 0, code = 0, first = job->rank == ROOT;
    char answer = 0;

    if (job->peer < 0) return 0;
    if (job->operation == LATENCY) {
        for (int turn = 0; turn < 2; turn++)
            if (first == (turn == 0))
                code |= mpi->send(job->given, job->count, job->type, job->peer, TAG, job->comm);
            else
                code |= mpi->recv(job->taken, job->count, job->type, job->peer, TAG, job->comm, status);
        return code;
    }
    for (int i = 0; i < 2 * MOST_MESSAGES; i++) requests[i] = 0;
    for (int i = 0; (job->operation == BIDIRECTIONAL || !first) && i < job->window; i++)
        code |= mpi->irecv(job->taken, job->count, job->type, job->peer, TAG, job->comm, &requests[number++]);
    for (int i = 0; (job->operation == BIDIRECTIONAL || first) && i < job->window; i++)
        code |= mpi->isend(job->given, job->count, job->type, job->peer, TAG, job->comm, &requests[number++]);
    for (int i = 0; i < number; i++) code |= mpi->wait(&requests[i], status);
    if (job->operation == BIDIRECTIONAL) return code;
    /* The answer is part of the time, as in osu_bw: the last byte has come. */
    if (first) return code | mpi->recv(&answer, 0, job->type, job->peer, TAG + 1, job->comm, status);
    return code | mpi->send(&answer, 0, job->type, job->peer, TAG + 1, job->comm);
}

/* A blocking collective ignores the request, which is one argument more than it has. */
static int collective(const struct library *mpi, const struct job *job) {
    void *in_place = (void *)job->in_place, *given = job->given, *taken = job->taken;
    word status[STATUS_WORDS], request = 0, type = job->type, comm = job->comm;
    int n = job->count, root = ROOT, code;

    switch (job->operation) {
    case ALL_REDUCE: code = mpi->call(in_place, taken, n, type, job->sum, comm, &request); break;
    case REDUCE:
        code = mpi->call(job->rank == ROOT ? in_place : taken, taken, n, type, job->sum, root, comm, &request);
        break;
    case BROADCAST: code = mpi->call(taken, n, type, root, comm, &request); break;
    case REDUCE_SCATTER: code = mpi->call(given, taken, n, type, job->sum, comm, &request); break;
    case ALL_GATHER:
    case ALL_TO_ALL: code = mpi->call(given, n, type, taken, n, type, comm, &request); break;
    case GATHER:
    case SCATTER: code = mpi->call(given, n, type, taken, n, type, root, comm, &request); break;
    default: code = mpi->call(comm, &request);
    }
    return job->blocking ? code : code | mpi->wait(&request, status);
}

/* Writes the seconds of `times` calls; returns 0, or not 0 if one failed. */
int hires_mpi_loop(const struct library *mpi, const struct job *job, int times, double *seconds) {
    int code = 0;

    for (int i = 0; i < times; i++) {
        mpi->barrier(job->comm);
        double began = mpi->now();
        code |= job->operation <= BIDIRECTIONAL ? messages(mpi, job) : collective(mpi, job);
        seconds[i] = mpi->now() - began;
    }
    return code;
}
