// The scheduler of common.cuh.

#pragma once

dim3 gridDim(1), blockDim(1);
uint3 blockIdx{}, threadIdx{};
std::vector<fiber> fibers;
ucontext_t scheduler;
unsigned running;
barrier of_block, of_warp[32];
int exchanged[1024];
static const std::function<void()> * running_kernel;

static void run_fiber() {
    (*running_kernel)();
    fibers[running].ended = true;
    swapcontext(&fibers[running].context, &scheduler);
}

void run_kernel(dim3 grid, dim3 block, const std::function<void()> & kernel) {
    gridDim = grid;
    blockDim = block;
    running_kernel = &kernel;
    const unsigned n = block.x*block.y*block.z;
    fibers.resize(n);
    for (auto & each : fibers) { each.stack.resize(256 << 10); }
    for (unsigned number = grid.x*grid.y*grid.z; number-- > 0;) {
        blockIdx = {number % grid.x, number/grid.x % grid.y, number/grid.x/grid.y};
        of_block = {};
        for (auto & warp : of_warp) { warp = {}; }
        for (unsigned i = 0; i < n; ++i) {
            fiber & each = fibers[i];
            getcontext(&each.context);
            each.context.uc_stack.ss_sp = each.stack.data();
            each.context.uc_stack.ss_size = each.stack.size();
            each.context.uc_link = nullptr;
            each.index = {i % block.x, i/block.x % block.y, i/block.x/block.y};
            each.ended = false;
            makecontext(&each.context, run_fiber, 0);
        }
        for (unsigned left = n; left > 0;) {
            for (running = 0; running < n; ++running) {
                if (!fibers[running].ended) {
                    threadIdx = fibers[running].index;
                    swapcontext(&scheduler, &fibers[running].context);
                    left -= fibers[running].ended;
                }
            }
        }
    }
}
